// The latest turns as waterfalls: where the caller's wait went.

import { $, el, ms, seconds, shown } from "/console/base.js";
import { ownBuffer } from "/console/talk.js";

const KEPT = 12;
const sum = (...values) => (values.every(value => value == null) ? null : values.reduce((all, value) => all + (value ?? 0), 0));
/** Colour, name, meaning and length of each stage, in the order in which they pass. */
const STAGES = [
  ["k1", "end of turn", "from the caller's last sound to words", w => w.endOfTurnMs],
  ["k3", "agent", "to the first text", w => w.agentMs],
  ["k5", "queued", "to the voice's first step", w => sum(w.queueMs, w.voice?.waitMs)],
  ["k6", "prefill", "the text through the language model", w => w.voice?.prefillMs],
  ["k7", "first token", "to the first speech token", w => w.voice?.firstTokenMs],
  ["k8", "first mel", "to the first mel frames", w => w.voice?.firstMelMs],
  // Of what was kept, or made by a voice that does not tell, it is one piece.
  ["k2", "first PCM", "to the first sound made", w => (w.voice ? w.voice.firstPcmMs : w.firstAudioMs)],
  ["k4", "first packet", "encoded and sent", w => w.egressMs],
  ["k9", "heard", "half the round trip, and this page's own jitter buffer", w => w.heardMs],
];

const turns = new Map();

export function turnEvent(event) {
  const key = event.callId + "/" + event.utteranceId;
  const turn = turns.get(key) ?? { text: "", waits: {} };
  if (event.event === "turnStarted") turn.began = true;
  else if (event.event === "turn") turn.waits = { ...event }; // every stage, where the turn answers something that was said
  else if (event.event === "firstAudio") {
    // Behind other speech the wait is no latency.
    turn.behind = !event.immediate;
    turn.waits = { ...(event.stages ?? { firstAudioMs: event.afterMs }) };
  } else if (event.event === "speaking") turn.text = (turn.text + " " + event.text).trim();
  else if (event.event === "interrupted") Object.assign(turn, { sent: event.heard?.sentMs, how: "interrupted" });
  else if (event.event === "turnEnded") Object.assign(turn, { sent: event.heard?.sentMs ?? turn.sent, how: turn.how ?? event.how, text: turn.text || (event.heard?.text ?? "") });
  else if (event.event === "underrun") turn.gaps = (turn.gaps ?? 0) + 1;
  else return;
  if (turn.waits.networkMs != null) turn.waits.heardMs ??= turn.waits.networkMs + ownBuffer(event.callId);
  turns.delete(key);
  turns.set(key, turn);
  while (turns.size > KEPT) turns.delete(turns.keys().next().value);
  if (shown("talk")) draw();
}

/** The stages that a turn went through: colour, name, meaning, milliseconds. */
const parts = turn => (turn.behind ? [] : STAGES.map(([k, name, about, of]) => [k, name, about, of(turn.waits)]).filter(([, , , time]) => time));
const total = turn => parts(turn).reduce((all, [, , , time]) => all + time, 0);

function draw() {
  const list = [...turns.values()].reverse();
  const longest = Math.max(...list.map(total), 1);
  const met = new Set(list.flatMap(turn => parts(turn).map(([k]) => k)));
  $("turns").replaceChildren(
    el("ul", { class: "legend" }, ...STAGES.filter(([k]) => met.has(k)).map(([k, name, about]) => el("li", {}, el("i", { class: k }), `${name}: ${about}`))),
    ...list.map(turn => {
      const bar = el("div", { class: "bar", "aria-hidden": "true" });
      // Widths by the CSSOM: an inline style attribute would need a weaker content policy.
      for (const [k, , , time] of parts(turn)) {
        const part = el("i", { class: k });
        part.style.width = (100 * time) / longest + "%";
        bar.append(part);
      }
      const all = parts(turn).map(([, name, , time]) => `${name} ${ms(time)}`);
      const words = [
        turn.behind ? "after other speech" : all.length ? `${ms(total(turn))} = ${all.join(" + ")}` : "waits",
        turn.sent == null ? null : `spoken ${turn.sent < 10_000 ? (turn.sent / 1e3).toFixed(1) + " s" : seconds(turn.sent / 1e3)}`,
        turn.gaps ? `${turn.gaps} gaps` : null,
        turn.how && turn.how !== "done" ? turn.how : null,
      ];
      return el("div", { class: "turn" },
        el("span", { textContent: turn.text || "…", title: turn.text }),
        el("div", {}, bar, el("span", { class: "figures-line", textContent: words.filter(Boolean).join(" · ") })));
    }),
  );
}
