// The latest turns as waterfalls: where the caller's wait went.

import { $, el, ms, seconds, shown } from "/console/base.js";

const KEPT = 12;
/** Something that was said longer ago than this is not what a turn answers, in milliseconds. */
const ANSWERS = 20_000;
const STAGES = [
  ["k1", "recognised", "from the caller's silence to words"],
  ["k3", "agent", "from words to the first text"],
  ["k2", "voice", "from text to the first packet"],
];

const turns = new Map();
const callers = new Map();

export function turnEvent(event) {
  const now = performance.now();
  const caller = callers.get(event.callId) ?? {};
  callers.set(event.callId, caller);
  if (event.event === "vad") {
    if (!event.speaking) caller.quiet = now;
    return;
  }
  if (event.event === "prompt" && event.last) {
    Object.assign(caller, { words: now, said: caller.quiet });
    return;
  }
  if (event.event === "ended") {
    callers.delete(event.callId);
    return;
  }
  const key = event.callId + "/" + event.utteranceId;
  const turn = turns.get(key) ?? { text: "", waits: {} };
  if (event.event === "turnStarted") {
    turn.at = now;
    if (caller.words && now - caller.words < ANSWERS) {
      turn.waits.k3 = now - caller.words;
      if (caller.said && caller.words - caller.said < ANSWERS) turn.waits.k1 = Math.max(0, caller.words - caller.said);
      // One turn answers; what follows it was begun by the agent.
      caller.words = null;
    }
  } else if (event.event === "firstAudio") {
    // Behind other speech the wait is no latency.
    turn.behind = !event.immediate;
    turn.waits.k2 = event.afterMs;
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

const total = turn => (turn.behind ? 0 : Object.values(turn.waits).reduce((sum, wait) => sum + wait, 0));

function draw() {
  const list = [...turns.values()].reverse();
  const longest = Math.max(...list.map(total), 1);
  $("turns").replaceChildren(
    el("ul", { class: "legend" }, ...STAGES.map(([k, name, about]) => el("li", { title: about }, el("i", { class: k }), `${name}: ${about}`))),
    ...list.map(turn => {
      const bar = el("div", { class: "bar", "aria-hidden": "true" });
      // Widths by the CSSOM: an inline style attribute would need a weaker content policy.
      for (const [k] of STAGES) {
        if (turn.behind || turn.waits[k] == null) continue;
        const part = el("i", { class: k });
        part.style.width = (100 * turn.waits[k]) / longest + "%";
        bar.append(part);
      }
      const parts = STAGES.filter(([k]) => turn.waits[k] != null && !turn.behind).map(([k, name]) => `${name} ${ms(turn.waits[k])}`);
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
