"""Word errors of faster-whisper on what `antiphon-loadgen dictate --keep FOLDER` said, to compare with the same words on calls.

whisper_words.py MODEL FOLDER: MODEL is a checkpoint of CTranslate2 (the one that `.ci/run` fetches is tiny.en). Needs
`pip install faster-whisper`. Greedy, in English, each file by itself, as a reader of files would use it.
"""

import collections
import json
import re
import sys
from pathlib import Path

from faster_whisper import WhisperModel


def words(text):
    text = text.lower().replace("\u2019", "'").replace("\u2018", "'")
    return [word for word in (w.strip("'") for w in re.split(r"[^\w']|_", text)) if word]


def errors(said, recognised):
    row = list(range(len(recognised) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(recognised, 1):
            before, row[j] = row[j], min(before + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def main(checkpoint, folder):
    model = WhisperModel(checkpoint, device="cpu", compute_type="float32")
    wrong, count = collections.Counter(), collections.Counter()
    for line in (folder / "said.jsonl").read_text().splitlines():
        case = json.loads(line)
        segments, _ = model.transcribe(str(folder / case["file"]), language="en", beam_size=1)
        said = words(case["said"])
        wrong[case["noise"]] += errors(said, words(" ".join(segment.text for segment in segments)))
        count[case["noise"]] += len(said)
    for noise, all_words in count.items():
        print(f"noise {noise}: {100 * wrong[noise] / all_words:.1f} % of {all_words} words")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
