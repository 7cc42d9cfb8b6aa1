#!/bin/sh
# Parity and speed of the GPU engine on a machine that has a GPU but no Rust.
#
#   tests/gpu/run.sh build DIR    here: builds, strips and compresses everything needed into DIR
#   ./run.sh all [OUT]            there, in DIR: parity, failures, comparison with the CPU, memory, cost of every stage
#                                 and kernel, then the engine as a whole
#   ./run.sh PART [OUT]           there: one of parity, failures, compare, memory, costs, start, bench, rate, gpus,
#                                 calls, worker, text, small, hear, batch, options
#
# DIR is about 20 MB and needs only the NVIDIA driver, NVRTC and cuBLASLt of CUDA 13. Random weights of full size are
# made there, in the system's temporary folder (3.4 GB).
set -eu

build() {
    dir=$1
    mkdir -p "$dir/tests/data/golden"
    # One command for both, which says itself what is wrong; the second time it only names what it built.
    cargo build --release --workspace --bins
    cargo test --release --test gpu --no-run
    test_binary=$(cargo test --release --test gpu --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' | tail -1)
    [ -n "$test_binary" ] || { echo "cargo names no test binary" >&2; exit 1; }
    strip -o "$dir/gpu" "$test_binary"
    strip -o "$dir/antiphon" target/release/antiphon
    strip -o "$dir/antiphon-loadgen" target/release/antiphon-loadgen
    xz -1 -f "$dir/gpu" "$dir/antiphon" "$dir/antiphon-loadgen"
    cp -r tests/data/golden/cosyvoice3 "$dir/tests/data/golden/"
    cp -r tests/data/whisper "$dir/tests/data/"
    cp tests/gpu/run.sh "$dir/"
}

unpack() {
    for f in gpu antiphon antiphon-loadgen; do
        [ ! -f "$f.xz" ] || [ -x "$f" ] || { xz -dk "$f.xz" && chmod +x "$f"; }
    done
}

parity() { ./gpu --nocapture --test-threads=1; }

# What goes wrong ends alone. The last takes the device from whoever else uses it, so it has a process of its own.
failures() {
    ./gpu --nocapture --test-threads=1 failures::
    ./gpu --nocapture --ignored a_device_that_is_lost
}

# Full size, teacher-forced, against the CPU engine on as many cores as there are.
compare() { ./gpu --nocapture --ignored full_size_agrees; }

# Two hundred utterances resident: the parts against the driver's figure.
memory() { ./gpu --nocapture --ignored memory_is_accounted; }

# Where there are several: what a kernel's fault on one does to another; then one engine thread each, streams placed where
# there is room.
gpus() {
    ./gpu --nocapture --ignored a_trap_on_one_of_two
    ./antiphon bench --engine cosyvoice3 --device auto --model random-full --speech-seconds 8 --voice random-k10 \
        --throughput --seconds 10 --concurrency 128,256 --json "$1/gpus.json"
}

costs() {
    ./gpu --nocapture --ignored gemm_costs
    ./gpu --nocapture --ignored stage_costs
    ./gpu --nocapture --ignored kernel_costs
}

bench() {
    run="./antiphon bench --engine cosyvoice3 --device cuda:0 --model random-full --speech-seconds 8"
    # Alone and as fast as it comes, first hop of ten tokens, then of twenty-five; calls that talk in real time, each
    # turn after the last; the same with turns that arrive by chance.
    $run --voice random-k10 --throughput --seconds 10 --concurrency 1,16,64,128 --json "$1/throughput.json"
    $run --voice random --throughput --seconds 10 --concurrency 1 --json "$1/alone-k25.json"
    $run --voice random-k10 --seconds 12 --concurrency 50,100,150,200,300,400 --json "$1/talk.json"
    $run --voice random-k10 --seconds 15 --concurrency 100 --arrivals 10 --json "$1/open.json"
    # Live calls without and with batch work that always waits, and that alone.
    $run --voice random-k10 --seconds 15 --concurrency 50,100 --arrivals 8 --side-by-side --batch 256 --json "$1/batch.json"
}

# Turns a second, open loop, each on a stream of its own: first audio below 100 ms at the 95th percentile and no stall?
# One table for each length of a turn (TURN_SECONDS), one row for each rate (RATES).
rate() {
    for seconds in ${TURN_SECONDS:-2.7}; do
        # As many characters as so much speech has: admission learns lengths by them.
        text=$(awk -v n="$seconds" 'BEGIN { for (i = 0; i < n * 3; i++) printf "two%s", i + 1 < n * 3 ? " " : "." }')
        ./antiphon bench --engine cosyvoice3 --device "${DEVICE:-cuda:0}" --model random-full --voice random-k10 \
            --speech-seconds "$seconds" --text "$text" --turn-rates "${RATES:-10,25,50,75,100,125,150,200,300}" \
            --seconds "${SECONDS_EACH:-12}" --json "$1/rate-$seconds.json"
    done
}

# Where `bench` and `calls` find random weights of full size.
weights() {
    model=${TMPDIR:-/tmp}/antiphon-random-full
    [ -f "$model/voices/random-30s.safetensors" ] || ./antiphon model random "$model" --size full
}

# What gives the processes that follow random weights of full size to speak with. They never end by themselves: each text id
# becomes as much speech as in real English, of which the random tokenizer makes as many ids as the released one.
spoken() {
    weights
    export ANTIPHON_ENGINE__KIND=cosyvoice3 ANTIPHON_ENGINE__MODEL="$model" ANTIPHON_ENGINE__VOICE=random-k10
    export ANTIPHON_ENGINE__TOKENS_PER_ID=6.5 ANTIPHON_STATE__DIR="${TMPDIR:-/tmp}/antiphon-calls"
}

# Whole calls, half of them SIP and half WebRTC, by what callers hear: $2 is the report.
ladder() {
    # Each call has a few sockets, on both sides.
    ulimit -n "$(ulimit -Hn)"
    ./antiphon-loadgen ladder --target http://127.0.0.1:8080 --legs sip,webrtc --spawn "./antiphon serve" --no-search \
        --levels "$1" --seconds "${SECONDS_EACH:-12}" --no-verify -o "$2"
}

calls() {
    spoken
    ladder "${LEVELS:-4,8,16,24,32,48,100,200,300,400}" "$1/calls.json"
}

# The same calls in one process, and with a gateway that has no GPU and a worker beside it that has.
worker() {
    spoken
    ladder "${LEVELS:-100,300}" "$1/in-process.json"
    export ANTIPHON_CLUSTER__TOKEN=calls-through-a-worker-of-this-machine
    ANTIPHON_STATE__DIR=$ANTIPHON_STATE__DIR/worker ./antiphon worker --listen 127.0.0.1:7070 --http 127.0.0.1:7170 \
        > "$1/worker.log" 2>&1 &
    there=$!
    trap 'kill $there 2> /dev/null || true' EXIT
    up http://127.0.0.1:7170/readyz
    ANTIPHON_ENGINE__KIND=tone ANTIPHON_ENGINE__WORKERS='["127.0.0.1:7070"]' \
        ladder "${LEVELS:-100,300}" "$1/through-a-worker.json"
    kill $there
    wait $there 2> /dev/null || true
    trap - EXIT
}

# From the start of `serve` to its first yes at `/readyz`: kernels compiled first, then from the cache, twice.
start() {
    spoken
    for state in "no cache" "warm cache" "warm cache"; do
        [ "$state" = "warm cache" ] || rm -rf "$ANTIPHON_STATE__DIR"
        begun=$(date +%s.%N)
        ./antiphon serve > "$1/start.log" 2>&1 &
        it=$!
        tries=0
        until curl -sf http://127.0.0.1:8080/readyz > /dev/null; do
            tries=$((tries + 1))
            { kill -0 $it 2> /dev/null && [ $tries -lt 12000 ]; } || { echo "it does not become ready" >&2; exit 1; }
            sleep 0.01
        done
        echo "$begun $(date +%s.%N) $state" | awk '{ printf "start to ready, %s %s: %.2f s\n", $3, $4, $2 - $1 }' | tee -a "$1/start.txt"
        kill $it
        wait $it 2> /dev/null || true
    done
}

# Batch work of one, two and four workers, a process for each GPU, behind one gateway without a GPU: one job of SENTENCES for
# each worker (WORKERS: how many at a time). Needs curl. ENGINE=tone and VOICE=tone try the part out without a GPU.
batch() {
    [ "${ENGINE:-cosyvoice3}" = tone ] || weights
    ulimit -n "$(ulimit -Hn)"
    export ANTIPHON_CLUSTER__TOKEN=batch-work-on-one-machine ANTIPHON_STATE__DIR="${TMPDIR:-/tmp}/antiphon-batch"
    at=http://127.0.0.1:8080 one=""
    for count in ${WORKERS:-1 2 4}; do
        started="" addresses="" n=0
        while [ $n -lt "$count" ]; do
            CUDA_VISIBLE_DEVICES=$n ANTIPHON_ENGINE__KIND=${ENGINE:-cosyvoice3} ANTIPHON_ENGINE__MODEL="${model:-}" \
                ANTIPHON_ENGINE__TOKENS_PER_ID=6.5 ANTIPHON_STATE__DIR="$ANTIPHON_STATE__DIR/$n" \
                ./antiphon worker --listen 127.0.0.1:$((7070 + n)) --http 127.0.0.1:$((7170 + n)) > "$1/worker-$count-$n.log" 2>&1 &
            started="$started $!" addresses="$addresses${addresses:+,}\"127.0.0.1:$((7070 + n))\"" n=$((n + 1))
        done
        trap 'kill $started 2> /dev/null || true' EXIT
        n=0
        while [ $n -lt "$count" ]; do
            up "http://127.0.0.1:$((7170 + n))/readyz"
            n=$((n + 1))
        done
        ANTIPHON_ENGINE__KIND=tone ANTIPHON_ENGINE__WORKERS="[$addresses]" ANTIPHON_BATCH__LANES=$((256 * count)) \
            ANTIPHON_BATCH__MAX_ITEMS=1000000 ./antiphon serve > "$1/gateway-$count.log" 2>&1 &
        started="$started $!"
        up "$at/readyz"
        # All workers are known, and each has made its first steps.
        sleep 5
        job $((64 * count)) > /dev/null
        made=$(job $((${SENTENCES:-1000} * count)))
        one=${one:-$(echo "$made $count" | awk '{ print $1 / $3 }')}
        echo "$made $count $one" | awk '{ printf("%d workers: %.1f s of speech a second, %.1f s; %.1f %% of linear\n", $3, $1, $2,
            100 * $1 / $3 / $4) }' | tee -a "$1/batch.txt"
        kill $started
        wait $started 2> /dev/null || true
        trap - EXIT
    done
}

# Waits until this address answers well: a model may take minutes to load.
up() {
    tries=0
    until curl -sf "$1" > /dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || { echo "$1 does not answer" >&2; exit 1; }
        sleep 1
    done
}

# A job of so many sentences: seconds of speech a second, and how long it took. Its stream ends with it.
job() {
    items=$(awk -v n="$1" 'BEGIN { for (i = 1; i <= n; i++) {
        printf("%s\"Sentence %d of the book is neither short nor very long.\"", (i > 1 ? "," : ""), i) } }')
    begun=$(date +%s.%N)
    id=$(printf '{"voice":"%s","items":[%s]}' "${VOICE:-random-k10}" "$items" |
        curl -sf -H 'content-type: application/json' --data-binary @- "$at/v1/audio/speech/batch" |
        sed -n 's/.*"id":"\([^"]*\)".*/\1/p')
    [ -n "$id" ] || { echo "the job is not taken" >&2; exit 1; }
    curl -sfN "$at/v1/jobs/$id/events" > /dev/null
    ended=$(date +%s.%N)
    curl -sf "$at/v1/jobs/$id" | tr '{' '\n' | sed -n 's/.*"durationMs":\([0-9]*\).*/\1/p' |
        awk -v took="$(echo "$begun $ended" | awk '{ print $2 - $1 }')" '{ all += $1 } END { print all / 1000 / took, took }'
}

# How soon a text sounds that comes token by token: whole calls, sentence against token mode, then 100 and 200 at once.
text() {
    ulimit -n "$(ulimit -Hn)"
    ./gpu --nocapture --ignored text_rates
}

# Whisper: what a window and a token cost; and a hundred callers who talk, without and with forty recognitions a second
# beside them: two or three a turn, as of a hundred callers who speak and listen by turns.
hear() {
    ./gpu --nocapture --ignored whisper_costs
    run="./antiphon bench --engine cosyvoice3 --device cuda:0 --model random-full --speech-seconds 8 --voice random-k10"
    $run --seconds 15 --concurrency 50,100 --json "$1/deaf.json"
    $run --seconds 15 --concurrency 50,100 --hear 40 --json "$1/hearing.json"
}

# A card held to less memory: utterances of 8 s at once, whose text has some 80 ids, in a voice of 30 s.
small() {
    weights
    text="Thank you for waiting. I have looked at the last three invoices, and you were charged twice in March. The amount \
of forty two pounds and sixteen pence will be back on your card within five working days, and I can offer you a window seat \
on the seven thirty train, or an aisle seat an hour later, if you tell me the last four digits of the old account."
    for held in "16GB 10" "24GB 22" "32GB 30"; do
        set -- "$1" $held
        echo "-- held to $2, $3 at once"
        ANTIPHON_ENGINE__MEMORY=$2 ./antiphon bench --engine cosyvoice3 --device cuda:0 --model random-full --speech-seconds 8 \
            --voice random-30s --text "$text" --seconds 10 --concurrency "$3" --json "$1/small-$2.json"
    done
}

# What it costs to have the same bits in any company, and to keep keys and values, or to multiply, in 8 bits.
options() {
    run="./antiphon bench --engine cosyvoice3 --device cuda:0 --model random-full --speech-seconds 8 --voice random-k10"
    for option in "" ANTIPHON_ENGINE__INVARIANT=true ANTIPHON_ENGINE__KV=int8 ANTIPHON_ENGINE__PRODUCTS=fp8; do
        echo "-- ${option:-as it is}"
        env $option $run --throughput --seconds 8 --concurrency 1,64 --json "$1/${option:-plain}.json"
    done
}

# Every part, whatever became of the one before; the exit code says whether all passed.
all() {
    wrong=""
    for part in parity failures compare memory costs bench; do
        echo "== $part"
        # A process of its own: a shell ignores -e in what is tested.
        sh "$0" "$part" "$1" || wrong="$wrong $part"
    done
    [ -z "$wrong" ] || { echo "not passed:$wrong"; exit 1; }
}

case ${1:-} in
build) build "${2:?a directory}" ;;
parity) unpack; parity ;;
failures) unpack; failures ;;
compare) unpack; compare ;;
memory) unpack; memory ;;
rate) unpack; rate "${2:-.}" ;;
gpus) unpack; gpus "${2:-.}" ;;
costs) unpack; costs ;;
bench) unpack; bench "${2:-.}" ;;
calls) unpack; calls "${2:-.}" ;;
worker) unpack; worker "${2:-.}" ;;
start) unpack; start "${2:-.}" ;;
text) unpack; text ;;
small) unpack; small "${2:-.}" ;;
hear) unpack; hear "${2:-.}" ;;
batch) unpack; batch "${2:-.}" ;;
options) unpack; options "${2:-.}" ;;
all) unpack; all "${2:-.}" ;;
*) sed -n '2,11p' "$0"; exit 64 ;;
esac
