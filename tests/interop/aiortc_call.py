#!/usr/bin/env python3
"""Calls a gateway's WHIP-style endpoint with aiortc and says what it heard.

    aiortc_call.py URL [--agent NAME] [--token TOKEN] [--audio-only]

Prints one JSON line. Exit status: 0 speech was heard and the mark came back, 1 not, 77 aiortc is missing.
"""

import argparse
import array
import asyncio
import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request

try:
    import av
    from aiortc import RTCPeerConnection, RTCSessionDescription
    from aiortc.mediastreams import AudioStreamTrack
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)

SETUP_S = 15
LISTEN_S = 15
# Of full scale. Speech is around 0.1, the comfort noise of a silent codec below 0.001.
THRESHOLD = 0.01
# 200 ms of 20 ms frames.
LOUD_FRAMES = 10


def http(method, url, token, body=None, kind=None):
    request = urllib.request.Request(url, data=body, method=method)
    if kind:
        request.add_header("Content-Type", kind)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.status, response.headers, response.read().decode()


async def call(arguments):
    result = {"client": "aiortc", "connected": False, "heard": False, "rms": 0.0, "channel": False}
    loop = asyncio.get_running_loop()
    connected, heard, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    peer = RTCPeerConnection()
    peer.addTrack(AudioStreamTrack())
    channel = peer.createDataChannel("agent")
    tasks = []

    async def listen(track):
        resampler = av.AudioResampler(format="s16", layout="mono", rate=48000)
        loud = 0
        while True:
            for frame in resampler.resample(await track.recv()):
                samples = array.array("h", bytes(frame.planes[0])[: 2 * frame.samples])
                rms = math.sqrt(sum(x * x for x in samples) / max(len(samples), 1)) / 32768
                result["rms"] = max(result["rms"], round(rms, 4))
                loud += rms > THRESHOLD
                if loud >= LOUD_FRAMES:
                    heard.set()

    @peer.on("track")
    def on_track(track):
        tasks.append(loop.create_task(listen(track)))

    @peer.on("connectionstatechange")
    def on_state():
        if peer.connectionState == "connected":
            connected.set()

    @channel.on("open")
    def on_open():
        channel.send(json.dumps({"type": "text", "token": "Hello from the other side.", "last": True}))
        channel.send(json.dumps({"type": "mark", "name": "interop"}))

    @channel.on("message")
    def on_message(text):
        # The mark comes back: echoed by a test's call, by a gateway once everything before it was spoken.
        if json.loads(text).get("name") == "interop":
            answered.set()

    location = None
    base = arguments.url.rstrip("/")
    try:
        await peer.setLocalDescription(await peer.createOffer())
        url = base + "/v1/webrtc"
        if arguments.agent:
            url += "?" + urllib.parse.urlencode({"agent": arguments.agent})
        status, headers, answer = await asyncio.to_thread(
            http, "POST", url, arguments.token, peer.localDescription.sdp.encode(), "application/sdp"
        )
        location = urllib.parse.urljoin(base + "/", headers["Location"])
        assert status == 201, f"POST gave {status}"
        await peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await asyncio.wait_for(connected.wait(), SETUP_S)
        result["connected"] = True
        wanted = [heard.wait()] if arguments.audio_only else [heard.wait(), answered.wait()]
        await asyncio.wait_for(asyncio.gather(*wanted), LISTEN_S)
    except urllib.error.HTTPError as error:
        result["error"] = f"{error.code}: {error.read().decode(errors='replace')}"
    except Exception as error:  # whatever it was, it is the result
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        result["heard"], result["channel"] = heard.is_set(), answered.is_set()
        if location:
            try:
                result["deleted"], _, _ = await asyncio.to_thread(http, "DELETE", location, arguments.token)
            except Exception as error:
                result["error"] = f"DELETE: {error}"
        for task in tasks:
            task.cancel()
        await peer.close()
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--agent")
    parser.add_argument("--token")
    parser.add_argument("--audio-only", action="store_true", help="do not insist on the data channel")
    arguments = parser.parse_args()
    result = asyncio.run(call(arguments))
    print(json.dumps(result))
    good = result["heard"] and (result["channel"] or arguments.audio_only) and result.get("deleted") == 200
    sys.exit(0 if good else 1)


main()
