#!/usr/bin/env python3
"""Calls a gateway's WHIP-style endpoint with headless Chromium and says what it heard.

    chromium_call.py URL [--agent NAME] [--token TOKEN] [--audio-only] [--tcp] [--codec NAME]

Needs nothing but Chromium and the standard library: a small server here hands out the page, passes its requests on
to the gateway (so that no CORS is needed) and takes its result. Prints one JSON line. Exit status: 0 speech was heard
and the mark came back, 1 not, 77 there is no Chromium.
"""

import argparse
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
OVERALL_S = 60

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>interop</title>
<audio id="out" autoplay></audio>
<script>
const wanted = JSON.parse(decodeURIComponent(location.hash.slice(1)));
const result = {client: "chromium", connected: false, heard: false, rms: 0, channel: false};
const sleep = ms => new Promise(done => setTimeout(done, ms));

async function until(condition, seconds) {
  for (let left = seconds * 50; left > 0 && !condition(); left--) await sleep(20);
  return condition();
}

async function call() {
  const peer = new RTCPeerConnection();
  const audio = new AudioContext();
  const buffer = new Float32Array(960);
  let analyser = null, loud = 0;
  peer.ontrack = event => {
    const stream = new MediaStream([event.track]);
    // Chromium decodes a remote stream only while an element plays it.
    document.getElementById("out").srcObject = stream;
    analyser = audio.createAnalyser();
    analyser.fftSize = 1024;
    audio.createMediaStreamSource(stream).connect(analyser);
  };
  const listening = setInterval(() => {
    if (!analyser) return;
    analyser.getFloatTimeDomainData(buffer);
    const rms = Math.sqrt(buffer.reduce((sum, x) => sum + x * x, 0) / buffer.length);
    result.rms = Math.max(result.rms, Math.round(rms * 1e4) / 1e4);
    if (rms > 0.01 && ++loud >= 10) result.heard = true;
  }, 20);
  const microphone = await navigator.mediaDevices.getUserMedia({audio: true});
  for (const track of microphone.getTracks()) peer.addTrack(track, microphone);
  if (wanted.codec) {
    const all = RTCRtpReceiver.getCapabilities("audio").codecs;
    peer.getTransceivers()[0].setCodecPreferences(all.filter(codec => codec.mimeType == "audio/" + wanted.codec));
  }
  const channel = peer.createDataChannel("agent");
  channel.onopen = () => {
    channel.send(JSON.stringify({type: "text", token: "Hello from the other side.", last: true}));
    channel.send(JSON.stringify({type: "mark", name: "interop"}));
  };
  // The mark comes back: echoed by a test's call, by a gateway once everything before it was spoken.
  channel.onmessage = ({data}) => { if (JSON.parse(data).name == "interop") result.channel = true; };
  await peer.setLocalDescription(await peer.createOffer());
  const query = wanted.agent ? "?agent=" + encodeURIComponent(wanted.agent) : "";
  // Trickled: the offer leaves before the candidates are known.
  // As if no UDP came through, neither way: the gateway would check what it is told of.
  const blocked = sdp => wanted.tcp ? sdp.replace(/a=candidate:\\S+ \\d+ udp .*\\r\\n/gi, "") : sdp;
  const response = await fetch("/v1/webrtc" + query, {
    method: "POST", headers: {"Content-Type": "application/sdp"}, body: blocked(peer.localDescription.sdp),
  });
  if (response.status != 201) throw new Error(response.status + ": " + await response.text());
  const session = response.headers.get("Location"), tag = response.headers.get("ETag");
  await peer.setRemoteDescription({type: "answer", sdp: blocked(await response.text())});
  if (await until(() => peer.iceGatheringState == "complete", 5)) {
    const lines = blocked(peer.localDescription.sdp).split("\\r\\n");
    const fragment = lines.filter(line => /^a=(ice-ufrag|ice-pwd):/.test(line)).slice(0, 2)
      .concat(lines.filter(line => /^a=candidate:/.test(line)), "a=end-of-candidates", "").join("\\r\\n");
    const patched = await fetch(session, {
      method: "PATCH", headers: {"Content-Type": "application/trickle-ice-sdpfrag", "If-Match": tag}, body: fragment,
    });
    result.patched = patched.status;
  }
  result.connected = await until(() => peer.connectionState == "connected", 15);
  await until(() => result.heard && (result.channel || wanted.audioOnly), 15);
  clearInterval(listening);
  const stats = await peer.getStats();
  const pair = [...stats.values()].find(entry => entry.type == "candidate-pair" && entry.nominated);
  const inbound = [...stats.values()].find(entry => entry.type == "inbound-rtp");
  result.codec = inbound && stats.get(inbound.codecId)?.mimeType;
  result.protocol = pair && stats.get(pair.localCandidateId).protocol;
  result.deleted = (await fetch(session, {method: "DELETE"})).status;
  peer.close();
}

call().catch(error => { result.error = String(error); })
  .then(() => fetch("/result", {method: "POST", body: JSON.stringify(result)}));
</script>
"""


def serve(arguments, results):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, headers, body):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if urllib.parse.urlparse(self.path).path == "/":
                self.reply(200, {"Content-Type": "text/html"}, PAGE.encode())
            else:
                self.reply(404, {}, b"")

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/result":
                results.append(json.loads(body))
                self.reply(204, {}, b"")
                done.set()
                return
            request = urllib.request.Request(arguments.url.rstrip("/") + self.path, body or None, method=self.command)
            for name in ["Content-Type", "If-Match"]:
                if self.headers.get(name):
                    request.add_header(name, self.headers[name])
            if arguments.token:
                request.add_header("Authorization", f"Bearer {arguments.token}")
            try:
                response = urllib.request.urlopen(request, timeout=10)
            except urllib.error.HTTPError as error:
                response = error
            except OSError as error:
                self.reply(502, {}, str(error).encode())
                return
            with response:
                names = ["Content-Type", "Location", "ETag"]
                headers = {name: response.headers[name] for name in names if response.headers.get(name)}
                self.reply(response.status, headers, response.read())

        do_POST = do_PATCH = do_DELETE = forward

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):
            pass  # the browser is stopped in the middle of a keep-alive connection

    done = threading.Event()
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, done


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--agent")
    parser.add_argument("--token")
    parser.add_argument("--audio-only", action="store_true", help="do not insist on the data channel")
    parser.add_argument("--tcp", action="store_true", help="use no UDP; the gateway must have [webrtc] tcp = true")
    parser.add_argument("--codec", help="offer this codec only, such as PCMU")
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print("SKIP: there is no Chromium (apt install chromium)")
        sys.exit(77)
    results = []
    server, done = serve(arguments, results)
    wanted = {"agent": arguments.agent, "audioOnly": arguments.audio_only, "tcp": arguments.tcp, "codec": arguments.codec}
    page = f"http://127.0.0.1:{server.server_port}/#{urllib.parse.quote(json.dumps(wanted))}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-dev-shm-usage",
                "--use-fake-ui-for-media-stream",
                "--use-fake-device-for-media-stream",
                "--autoplay-policy=no-user-gesture-required",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                page,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        tail = []
        reader = threading.Thread(target=lambda: tail.extend(browser.stderr.readlines()[-20:]), daemon=True)
        reader.start()
        done.wait(OVERALL_S)
        try:
            os.killpg(browser.pid, signal.SIGTERM)
            browser.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            try:
                os.killpg(browser.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            browser.wait(5)
        reader.join(2)
    server.shutdown()
    if not results:
        sys.stderr.write(b"".join(tail).decode(errors="replace"))
        results = [{"client": "chromium", "error": "the page did not report in time"}]
    result = results[0]
    print(json.dumps(result))
    good = result.get("heard") and (result.get("channel") or arguments.audio_only) and result.get("deleted") == 200
    good = good and (not arguments.codec or result.get("codec") == f"audio/{arguments.codec}")
    good = good and (not arguments.tcp or result.get("protocol") == "tcp")
    sys.exit(0 if good else 1)


main()
