// A call of this page: microphone, levels, captions of both sides, turns that are typed.

import { connect, devices as audioDevices } from "/antiphon.js";
import { $, api, attempt, bearer, el, ms, note, problem } from "/console/base.js";

let call = null;
const lines = new Map();
const live = () => call && call.state !== "ended";
export const callId = () => (live() ? call.id : null);
let buffered = 0;
/** What the browser holds back of a call of this page before it is heard, in milliseconds; of others nobody tells. */
export const ownBuffer = id => (id && id === callId() ? buffered : 0);

function controls() {
  const on = !!live();
  $("call").disabled = on;
  for (const id of ["hang", "mute", "speak", "prompt", "interrupt"]) $(id).disabled = !on;
  for (const key of $("keys").children) key.disabled = !on;
  $("state").textContent = call?.state ?? "idle";
  $("mute").textContent = call?.muted ? "Unmute" : "Mute";
  $("mute").setAttribute("aria-pressed", !!call?.muted);
}

async function listDevices() {
  const { microphones, speakers } = await audioDevices();
  const fill = (select, list, name) => {
    const before = select.value;
    select.replaceChildren(new Option("default", ""), ...list.filter(d => d.id && d.id !== "default").map((d, n) => new Option(d.label || `${name} ${n + 1}`, d.id)));
    select.value = [...select.options].some(option => option.value === before) ? before : "";
  };
  fill($("microphone"), microphones, "microphone");
  fill($("speaker"), speakers, "speaker");
}

/** A level in dBFS on its meter, and in words for those who do not see it. */
function level(id, value) {
  const shown = Math.round(Math.min(0, Math.max(-60, value)));
  const meter = $(id);
  meter.value = shown;
  meter.textContent = shown + " dBFS";
}

function blank() {
  for (const id of ["first", "rtt", "lost", "gaps"]) $(id).textContent = "–";
  for (const id of ["level-in", "level-out"]) level(id, -60);
}

$("call").onclick = attempt(async () => {
  $("call").disabled = true;
  $("captions").replaceChildren();
  lines.clear();
  blank();
  const microphone = $("use-microphone").checked ? $("microphone").value || true : false;
  const options = { agent: $("agent").value.trim() || undefined, token: bearer(), speaker: $("speaker").value || undefined };
  try {
    $("state").textContent = "connecting";
    try {
      call = await connect({ ...options, microphone });
    } catch (error) {
      if (error.code !== "microphone" && error.code !== "insecure_page") throw error;
      problem(new Error(error.message + ". You can listen and type."));
      call = await connect({ ...options, microphone: false });
    }
  } finally {
    controls();
  }
  const mine = call;
  mine.addEventListener("state", controls);
  mine.addEventListener("renewed", ({ detail }) => note("call", `${detail.before} was lost; ${detail.id} takes its place`));
  mine.addEventListener("ended", ({ detail }) => {
    note("call", `ended: ${detail.reason}`);
    controls();
    for (const id of ["level-in", "level-out"]) level(id, -60);
  });
  mine.addEventListener("level", ({ detail }) => {
    level("level-in", detail.input);
    level("level-out", detail.output);
  });
  mine.addEventListener("blocked", () => ($("blocked").hidden = false));
  mine.addEventListener("caption", ({ detail }) => caption(detail));
  controls();
  listDevices().catch(() => {});
});
$("hang").onclick = () => call?.hangUp();
$("mute").onclick = () => call?.mute(!call.muted);
$("play").onclick = attempt(async () => {
  await call.play();
  $("blocked").hidden = true;
});
$("microphone").onchange = attempt(async () => {
  if (live() && $("use-microphone").checked) await call.setMicrophone($("microphone").value || true);
});
$("speaker").onchange = attempt(async () => {
  if (live()) await call.setSpeaker($("speaker").value);
});
$("say").onsubmit = attempt(() => call.say($("text").value, { interrupt: $("cut-in").checked }));
$("prompt").onclick = attempt(() => api("POST", `/v1/calls/${call.id}/prompt`, { text: $("text").value }));
$("interrupt").onclick = attempt(() => call.interrupt());
for (const key of "123456789*0#") {
  $("keys").append(el("button", { type: "button", textContent: key, disabled: true, onclick: attempt(() => call.digits(key)) }));
}

/** One line of the transcript: words that were heard, the rest grey, or struck through once it is known to be lost. */
function caption({ who, id, text, heard, final, how }) {
  let line = lines.get(id);
  if (!line) {
    line = el("p", { class: who });
    lines.set(id, line);
    $("captions").append(line);
  }
  const rest = text.startsWith(heard) ? text.slice(heard.length) : heard ? "" : text;
  line.replaceChildren(
    el("small", { textContent: who === "caller" ? "you" : "agent" }),
    heard,
    rest ? el(final ? "del" : "span", { class: "unheard", textContent: rest }) : "",
    final && how && how !== "done" ? el("small", { textContent: how }) : "",
  );
  const box = $("captions");
  box.scrollTop = box.scrollHeight;
  // Read aloud once, when it is known: words that change ten times a second are no use to a screen reader.
  if (final && heard) $("announce").textContent = `${who === "caller" ? "You" : "Agent"}: ${heard}`;
}

/** The gateway's own measure: from the instant it accepted the text to the first packet, where nothing came before. */
export function firstAudio(event) {
  if (event.callId === callId() && event.immediate) $("first").textContent = ms(event.afterMs);
}

export async function figures(calls) {
  if (!callId()) return;
  const mine = calls?.find(one => one.id === call.id);
  if (mine) $("gaps").textContent = mine.underruns;
  const stats = await call.stats();
  buffered = stats.bufferMs ?? 0;
  $("rtt").textContent = ms(stats.roundTripMs);
  $("lost").textContent = stats.received ? `${stats.lost} of ${stats.received + stats.lost}` : "–";
}

blank();
controls();
listDevices().catch(() => {});
navigator.mediaDevices?.addEventListener?.("devicechange", () => listDevices().catch(() => {}));
