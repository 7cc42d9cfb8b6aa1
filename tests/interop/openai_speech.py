"""Speech with OpenAI's Python client, unchanged: openai_speech.py URL. Exits 0 when everything works."""

import asyncio
import base64
import io
import json
import sys
import tempfile
import wave
from pathlib import Path

import openai

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests. After that, it goes home."
MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "pcm": b""}
# What OpenAI's client types name; every one must be accepted.
VOICES = ["alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse"]


def ask(kind="wav", **more):
    return {"model": "gpt-4o-mini-tts", "voice": "alloy", "input": TEXT, "response_format": kind, **more}


def whole(client):
    sizes, sounds = {}, {}
    for kind, magic in MAGIC.items():
        response = client.audio.speech.create(**ask(kind))
        audio = response.read()
        assert audio.startswith(magic) and len(audio) > 5_000, (kind, len(audio))
        sizes[kind], sounds[kind] = len(audio), audio
        assert client.audio.speech.create(**ask(kind)).content == audio, f"{kind} differs from one time to the next"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"speech.{kind}"
            client.audio.speech.create(**ask(kind)).write_to_file(path)
            assert path.read_bytes() == audio, kind
    assert sizes["flac"] < sizes["pcm"] and sizes["opus"] < sizes["pcm"] / 4, sizes
    without = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT).read()
    assert without, "no audio without response_format"
    return sizes, sounds


def streamed(client, sizes):
    for kind, magic in MAGIC.items():
        with client.audio.speech.with_streaming_response.create(**ask(kind)) as response:
            assert response.headers["content-type"].startswith("audio/"), response.headers
            pieces = list(response.iter_bytes(1_024))
        audio = b"".join(pieces)
        assert len(pieces) > 1 and audio.startswith(magic), (kind, len(pieces))
        # The header of a stream does not know its length; the sound is the same.
        assert len(audio) == sizes[kind], (kind, len(audio), sizes[kind])
        with tempfile.TemporaryDirectory() as folder, client.audio.speech.with_streaming_response.create(
            **ask(kind)
        ) as response:
            path = Path(folder) / "speech"
            response.stream_to_file(path)
            assert path.stat().st_size == sizes[kind]
    # Python's reader takes the header's length for what is there: it must cope with a stream's.
    sound = wave.open(io.BytesIO(client.audio.speech.create(**ask("wav")).read()))
    assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)


def events(client, sounds):
    pcm, done = b"", False
    with client.audio.speech.with_streaming_response.create(**ask("pcm", stream_format="sse")) as response:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[len("data: ") :])
            if event["type"] == "speech.audio.delta":
                pcm += base64.b64decode(event["audio"])
            elif event["type"] == "speech.audio.done":
                done = {"input_tokens", "output_tokens", "total_tokens"} <= event["usage"].keys()
    assert done and pcm == sounds["pcm"], (done, len(pcm))


def manner(client):
    for voice in VOICES:
        assert client.audio.speech.create(**{**ask("opus"), "input": "Hello.", "voice": voice}).read(), voice
    slow = len(client.audio.speech.create(**ask("pcm", speed=0.5)).read())
    fast = len(client.audio.speech.create(**ask("pcm", speed=2.0)).read())
    assert slow > 1.5 * fast, (slow, fast)
    assert client.audio.speech.create(**ask("pcm", instructions="Speak cheerfully.")).read()
    assert client.audio.speech.create(**ask("pcm"), extra_body={"seed": 7}).read()


def errors(client):
    for change in ({"response_format": "mp3"}, {"input": ""}, {"speed": 9.0}, {"voice": "nobody-of-this-name"}):
        try:
            client.audio.speech.create(**{**ask(), **change})
        except openai.BadRequestError as error:
            assert error.status_code == 400 and error.body["message"], error.body
        else:
            raise AssertionError(f"{change} was accepted")


async def concurrent(url, sizes):
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:

        async def one():
            async with client.audio.speech.with_streaming_response.create(**ask("pcm")) as response:
                return sum([len(piece) async for piece in response.iter_bytes()])

        assert set(await asyncio.gather(*[one() for _ in range(4)])) == {sizes["pcm"]}


def main():
    url = sys.argv[1].rstrip("/") + "/v1"
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60)
    sizes, sounds = whole(client)
    streamed(client, sizes)
    events(client, sounds)
    manner(client)
    errors(client)
    asyncio.run(concurrent(url, sizes))
    print(f"openai {openai.__version__}: {sizes}")


main()
