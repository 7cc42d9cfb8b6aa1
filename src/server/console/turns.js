// The latest turns as waterfalls: where the caller's wait went.

import { $, el, ms, seconds, shown } from "/console/base.js";

const KEPT = 12;
/** Colour, field of the event, name and meaning, in the order in which they pass. */
const STAGES = [
  ["k1", "endOfTurnMs", "end of turn", "from the caller's last sound to words"],
  ["k3", "agentMs", "agent", "to the first text"],
  ["k5", "queueMs", "queue", "to the voice's begin"],
  ["k2", "firstAudioMs", "voice", "to the first sound made"],
  ["k4", "egressMs", "egress", "to the first packet"],
];

const turns = new Map();

export function turnEvent(event) {
  const key = event.callId + "/" + event.utteranceId;
  const turn = turns.get(key) ?? { text: "", waits: {} };
  if (event.event === "turnStarted") turn.began = true;
  else if (event.event === "turn") turn.waits = event; // every stage, where the turn answers something that was said
  else if (event.event === "firstAudio") {
    // Behind other speech the wait is no latency.
    turn.behind = !event.immediate;
    if (turn.waits.firstAudioMs == null) turn.waits = { firstAudioMs: event.afterMs };
  } else if (event.event === "speaking") turn.text = (turn.text + " " + event.text).trim();
  else if (event.event === "interrupted") Object.assign(turn, { sent: event.heard?.sentMs, how: "interrupted" });
  else if (event.event === "turnEnded") Object.assign(turn, { sent: event.heard?.sentMs ?? turn.sent, how: turn.how ?? event.how, text: turn.text || (event.heard?.text ?? "") });
  else if (event.event === "underrun") turn.gaps = (turn.gaps ?? 0) + 1;
  else return;
  turns.delete(key);
  turns.set(key, turn);
  while (turns.size > KEPT) turns.delete(turns.keys().next().value);
  if (shown("talk")) draw();
}

const total = turn => (turn.behind ? 0 : STAGES.reduce((sum, [, field]) => sum + (turn.waits[field] ?? 0), 0));

function draw() {
  const list = [...turns.values()].reverse();
  const longest = Math.max(...list.map(total), 1);
  $("turns").replaceChildren(
    el("ul", { class: "legend" }, ...STAGES.map(([k, , name, about]) => el("li", {}, el("i", { class: k }), `${name}: ${about}`))),
    ...list.map(turn => {
      const bar = el("div", { class: "bar", "aria-hidden": "true" });
      // Widths by the CSSOM: an inline style attribute would need a weaker content policy.
      for (const [k, field] of STAGES) {
        if (turn.behind || !turn.waits[field]) continue;
        const part = el("i", { class: k });
        part.style.width = (100 * turn.waits[field]) / longest + "%";
        bar.append(part);
      }
      const parts = STAGES.filter(([, field]) => turn.waits[field] && !turn.behind).map(([, field, name]) => `${name} ${ms(turn.waits[field])}`);
      const words = [
        turn.behind ? "after other speech" : parts.join(" + ") || "waits",
        turn.sent == null ? null : `spoken ${seconds(turn.sent / 1e3)}`,
        turn.gaps ? `${turn.gaps} gaps` : null,
        turn.how && turn.how !== "done" ? turn.how : null,
      ];
      return el("div", { class: "turn" },
        el("span", { textContent: turn.text || "…", title: turn.text }),
        el("div", {}, bar, el("span", { class: "figures-line", textContent: words.filter(Boolean).join(" · ") })));
    }),
  );
}
