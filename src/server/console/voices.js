// Voices: list, listen, enrol by recording or file with consent, remove.

import { $, api, attempt, confirmed, el, play, refreshers, shown } from "/console/base.js";

/** Longest recording, in seconds; the shortest is 3. */
const LONGEST = 30;

export async function drawVoices() {
  const { voices } = await api("GET", "/v1/audio/voices");
  const chosen = $("job-voice").value;
  $("job-voice").replaceChildren(new Option("default", ""), ...voices.map(voice => new Option(voice.name)));
  $("job-voice").value = chosen;
  if (!shown("voices")) return;
  $("voices").replaceChildren(
    ...voices.map(voice => {
      const enrolled = voice.seconds != null || voice.createdMs != null || voice.consent != null;
      const about = [(voice.languages ?? []).join(", "), voice.seconds ? voice.seconds.toFixed(1) + " s" : null, enrolled ? "enrolled" : "built in"].filter(Boolean).join(" · ");
      return el("div", { class: "voice" },
        el("div", {}, el("strong", { textContent: voice.name }), el("div", { class: "hint", textContent: about })),
        el("button", { class: "small", textContent: "Listen", "aria-label": "Listen to " + voice.name, onclick: attempt(() => play("voice " + voice.name, "POST", "/v1/audio/speech", { model: "tts-1", input: $("sample").value, voice: voice.name, response_format: "wav" })) }),
        enrolled ? el("button", { class: "small danger", textContent: "Remove", "aria-label": "Remove " + voice.name, onclick: attempt(async () => {
          if (await confirmed(`Remove the voice ${voice.name}? Calls that ask for it are refused from then on.`, "Remove")) {
            await api("DELETE", "/v1/audio/voices/" + encodeURIComponent(voice.name));
            await drawVoices();
          }
        }) }) : null);
    }),
  );
}
refreshers.voices = drawVoices;

let recorder = null;
let recorded = null;
$("record").onclick = attempt(async () => {
  if (recorder) return recorder.stop();
  if (!navigator.mediaDevices) throw new Error("the browser gives a microphone to pages on HTTPS or localhost only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false } });
  const pieces = [];
  const started = performance.now();
  const length = () => (performance.now() - started) / 1e3;
  recorder = new MediaRecorder(stream);
  recorder.ondataavailable = event => pieces.push(event.data);
  const clock = setInterval(() => {
    $("recording").textContent = `recording, ${Math.floor(length())} s of ${LONGEST}`;
    if (length() >= LONGEST) recorder?.stop();
  }, 250);
  recorder.onstop = () => {
    clearInterval(clock);
    for (const track of stream.getTracks()) track.stop();
    recorded = new Blob(pieces, { type: recorder.mimeType });
    recorder = null;
    $("record").textContent = "Record";
    $("record").setAttribute("aria-pressed", "false");
    $("recording").textContent = length() < 3 ? "shorter than 3 seconds: record again" : `${length().toFixed(1)} s recorded`;
    $("hear-recording").hidden = false;
    const player = $("hear-recording");
    if (player.src) URL.revokeObjectURL(player.src);
    player.src = URL.createObjectURL(recorded);
  };
  recorder.start();
  $("record").textContent = "Stop";
  $("record").setAttribute("aria-pressed", "true");
});

/** A recording as WAV: every gateway reads that, whatever the browser records. */
async function asWav(blob) {
  const context = new AudioContext();
  try {
    const sound = await context.decodeAudioData(await blob.arrayBuffer());
    const mixed = new Float32Array(sound.length);
    for (let channel = 0; channel < sound.numberOfChannels; channel++) {
      for (const [n, sample] of sound.getChannelData(channel).entries()) mixed[n] += sample / sound.numberOfChannels;
    }
    const file = new DataView(new ArrayBuffer(44 + 2 * mixed.length));
    const words = (at, text) => [...text].forEach((c, n) => file.setUint8(at + n, c.charCodeAt(0)));
    words(0, "RIFF");
    file.setUint32(4, 36 + 2 * mixed.length, true);
    words(8, "WAVEfmt ");
    file.setUint32(16, 16, true);
    file.setUint16(20, 1, true);
    file.setUint16(22, 1, true);
    file.setUint32(24, sound.sampleRate, true);
    file.setUint32(28, 2 * sound.sampleRate, true);
    file.setUint16(32, 2, true);
    file.setUint16(34, 16, true);
    words(36, "data");
    file.setUint32(40, 2 * mixed.length, true);
    mixed.forEach((sample, n) => file.setInt16(44 + 2 * n, Math.max(-1, Math.min(1, sample)) * 32767, true));
    return new Blob([file.buffer], { type: "audio/wav" });
  } finally {
    context.close();
  }
}

$("enrol").onsubmit = attempt(async () => {
  const file = $("voice-file").files[0];
  if (!file && !recorded) throw new Error("record a sample or choose a file first");
  const form = new FormData();
  form.set("name", $("voice-name").value.trim());
  form.set("ref_text", $("voice-text").value.trim());
  form.set("consent", "given in the console on " + new Date().toISOString());
  form.set("audio_sample", file ?? (await asWav(recorded)), file?.name ?? "sample.wav");
  const said = $("enrolled");
  said.hidden = false;
  said.className = "note";
  said.textContent = "enrolling…";
  try {
    const added = await api("POST", "/v1/audio/voices", form);
    const advice = added.quality?.advice ?? [];
    said.className = "note good";
    said.replaceChildren(
      `${added.voice?.name ?? "The voice"} is enrolled.` + (advice.length ? " It could be better:" : ""),
      ...(advice.length ? [el("ul", { class: "advice" }, ...advice.map(one => el("li", { textContent: one.message })))] : []));
    recorded = null;
    await drawVoices();
  } catch (error) {
    said.className = "note bad";
    said.textContent = error.message;
  }
});
