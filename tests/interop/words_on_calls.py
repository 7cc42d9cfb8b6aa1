"""One cell of the table of words in tests/bench/README.md, as a whole: sentences said on calls, the turns that the gateway cuts
of them, and these turns heard by our Whisper and by faster-whisper, both with five texts side by side.

words_on_calls.py --codec pcmu|opus --loss PERCENT --noise none|DECIBELS --checkpoint CT2 --model MODEL [--realtime] [--out FOLDER]

CT2 is tiny.en for CTranslate2 (`.ci/run` fetches it), MODEL the same for us (`antiphon model convert CT2 MODEL`). Needs `antiphon`
and `antiphon-loadgen` (`--bin`, else target/debug), flite with its voices slt, rms and awb, and `pip install faster-whisper`. A cell
takes some five minutes of a core for the calls and as much again for each recogniser. FOLDER (else a temporary one) keeps the
sentences, the turns and all words.
"""

import argparse
import contextlib
import email
import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from whisper_words import errors, words

ROOT = Path(__file__).resolve().parents[2]
VOICES = ("slt", "rms", "awb")


def sentences(folder, count):
    """Makes the recordings, unless they are there: three voices in turn."""
    source = (ROOT / "loadgen/src/turns/sentences.rs").read_text()
    texts = re.findall(r'^    "(.*)",$', source.split("SENTENCES", 1)[1], re.MULTILINE)[:count]
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        wav = folder / f"{number:03}.wav"
        if not wav.exists():
            subprocess.run(["flite", "-voice", VOICES[number % len(VOICES)], "-t", text, "-o", wav], check=True)
        wav.with_suffix(".txt").write_text(text)
    return texts


class Keeper(http.server.BaseHTTPRequestHandler):
    """A transcription service that keeps what it is sent and answers with its number."""

    turns = None
    number = 0
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        form = email.message_from_bytes(b"content-type: " + self.headers["content-type"].encode() + b"\r\n\r\n" + body)
        sound = next(p for p in form.get_payload() if p.get_param("name", header="content-disposition") == "file")
        with Keeper.lock:
            number, Keeper.number = Keeper.number, Keeper.number + 1
        (Keeper.turns / f"{number:04}.wav").write_bytes(sound.get_payload(decode=True))
        answer = json.dumps({"text": f"turn {number}"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def call(args, folder, service):
    """Says all on calls; what each sentence became."""
    http_port, sip_port = free(), free()
    gateway = {
        "ANTIPHON_HTTP__BIND": f"127.0.0.1:{http_port}",
        "ANTIPHON_SIP__UDP": f"127.0.0.1:{sip_port}",
        "ANTIPHON_SIP__TCP": "off",
        "ANTIPHON_RECOGNIZER__URL": service,
        "XDG_STATE_HOME": str(folder / "state"),
    }
    command = [args.bin / "antiphon-loadgen", "dictate", "--sentences", folder / "said", "--codecs", args.codec]
    command += ["--loss", args.loss, "--noise", args.noise, "--calls", args.calls, "--output", folder / "dictate.json"]
    command += ["--target", f"sip:loadgen@127.0.0.1:{sip_port}", "--target", f"http://127.0.0.1:{http_port}"]
    command += ["--spawn", shlex.join([str(args.bin / "antiphon"), "serve"])]
    # On a machine with other work calls must not wait for it; recognisers may.
    command = ["chrt", "-r", "5", *command] if args.realtime else command
    subprocess.run([str(part) for part in command], env=os.environ | gateway, check=True)
    return json.loads((folder / "dictate.json").read_text())[0]["sentences"]


def ours(args, files):
    command = [args.bin / "antiphon", "model", "transcribe", args.model, *files, "--language", "en"]
    lines = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    return dict(line.split(": ", 1) if ": " in line else (line.rstrip(":"), "") for line in lines.splitlines())


def reference(args, files):
    from faster_whisper import WhisperModel

    model = WhisperModel(str(args.checkpoint), device="cpu", compute_type="float32")
    heard = {}
    for file in files:
        segments, _ = model.transcribe(str(file), language="en", beam_size=5)
        heard[str(file)] = " ".join(segment.text for segment in segments)
    return heard


def main():
    parser = argparse.ArgumentParser(description="words of calls: ours beside the reference")
    parser.add_argument("--codec", default="pcmu")
    parser.add_argument("--loss", default="0")
    parser.add_argument("--noise", default="none")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bin", type=Path, default=ROOT / "target/debug")
    parser.add_argument("--calls", default="8")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--realtime", action="store_true", help="calls before everything else (chrt)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        Keeper.turns = folder / "turns"
        Keeper.turns.mkdir(parents=True, exist_ok=True)
        sentences(folder / "said", args.count)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keeper)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = call(args, folder, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        # What was said in pieces was recognised in pieces; a sentence that became none has lost its words.
        numbers = [re.findall(r"turn (\d+)", one["recognised"]) for one in told]
        pieces = [[Keeper.turns / f"{int(number):04}.wav" for number in one] for one in numbers]
        files = [piece for one in pieces for piece in one]
        many, unheard = sum(len(one) > 1 for one in pieces), sum(not one for one in pieces)
        print(f"{len(told)} sentences, {many} of them in pieces, {unheard} unheard", flush=True)
        kept = []
        for name, hear in (("reference", reference), ("ours", ours)):
            began = time.monotonic()
            heard = hear(args, files)
            wrong = total = 0
            for one, turns in zip(told, pieces):
                said = words(one["said"])
                text = " ".join(heard.get(str(turn), "") for turn in turns)
                wrong, total = wrong + errors(said, words(text)), total + len(said)
                kept.append({"by": name, "said": one["said"], "heard": text, "turns": [turn.name for turn in turns]})
            seconds = time.monotonic() - began
            print(f"{name}: {100 * wrong / total:.1f} % of {total} words wrong; {seconds:.0f} s", flush=True)
        (folder / "words.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    sys.exit(main())
