#!/bin/sh
# Parity and speed of the GPU engine on a machine that has a GPU but no Rust.
#
#   tests/gpu/run.sh build DIR    here: builds, strips and compresses everything needed into DIR
#   ./run.sh all [OUT]            there, in DIR: parity, cost of every stage and kernel, then the engine as a whole
#   ./run.sh parity|costs|bench   there: one of them
#
# DIR is about 20 MB and needs only the NVIDIA driver, NVRTC and cuBLASLt of CUDA 13. Random weights of full size are
# made there, in the system's temporary folder (3.4 GB).
set -eu

build() {
    dir=$1
    mkdir -p "$dir/tests/golden"
    test_binary=$(cargo test --test gpu --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' | tail -1)
    cargo build --bin antiphon
    strip -o "$dir/gpu" "$test_binary"
    strip -o "$dir/antiphon" target/debug/antiphon
    xz -1 -f "$dir/gpu" "$dir/antiphon"
    cp -r tests/golden/cosyvoice3 "$dir/tests/golden/"
    cp tests/gpu/run.sh "$dir/"
}

unpack() {
    for f in gpu antiphon; do
        [ -x "$f" ] || { xz -dk "$f.xz" && chmod +x "$f"; }
    done
}

parity() { ./gpu --nocapture --test-threads=1; }

costs() {
    ./gpu --nocapture --ignored product_costs
    ./gpu --nocapture --ignored stage_costs
    ./gpu --nocapture --ignored kernel_costs
}

bench() {
    run="./antiphon bench --engine cosyvoice3 --device cuda:0 --model random-full --speech-seconds 8"
    # Alone and as fast as it comes, first hop of ten tokens, then of twenty-five; calls that talk in real time, each
    # turn after the last; the same with turns that arrive by chance.
    $run --voice random-k10 --throughput --seconds 10 --concurrency 1,16,64,128 --json "$1/throughput.json"
    $run --voice random --throughput --seconds 10 --concurrency 1 --json "$1/alone-k25.json"
    $run --voice random-k10 --seconds 12 --concurrency 50,100,150,200 --json "$1/talk.json"
    $run --voice random-k10 --seconds 15 --concurrency 100 --arrivals 10 --json "$1/open.json"
}

case ${1:-} in
build) build "${2:?a directory}" ;;
parity) unpack; parity ;;
costs) unpack; costs ;;
bench) unpack; bench "${2:-.}" ;;
all) unpack; parity; costs; bench "${2:-.}" ;;
*) sed -n '2,9p' "$0"; exit 64 ;;
esac
