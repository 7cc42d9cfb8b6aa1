// Live calls of every leg, and what happens on them.

import { $, address, api, attempt, el, ms, note, percent, refreshers, row, seconds, shown } from "/console/base.js";

let latest = [];
// At once when the panel is opened, with what was known last.
refreshers.calls = async () => drawCalls(latest);

export function drawCalls(list) {
  latest = list;
  $("calls-count").textContent = list.length;
  $("tab-calls").setAttribute("aria-label", `Calls, ${list.length} live`);
  if (!shown("calls")) return;
  const act = (one, name, work) => el("button", { class: "small", type: "button", textContent: name, "aria-label": `${name} ${one.from}`, onclick: attempt(work) });
  $("no-calls").hidden = list.length > 0;
  // Buttons that are drawn anew lose the keyboard's focus.
  const focus = document.activeElement?.closest?.("#calls") ? document.activeElement.getAttribute("aria-label") : null;
  $("calls").tBodies[0].replaceChildren(
    ...list.map(one =>
      row([
        ["Call", one.id.slice(0, 8)],
        ["Leg", `${one.leg ?? "sip"}, ${one.codec ?? one.state}`],
        ["From", address(one.from)],
        ["Agent", one.agent],
        ["State", one.held ? "held" : one.speaking ? "speaking" : one.callerSpeaking ? "listening" : one.state],
        ["Length", one.durationMs == null ? null : seconds(one.durationMs / 1e3), true],
        ["First audio", ms(one.firstAudioMs), true],
        ["Lost", one.fractionLost == null ? null : percent(one.fractionLost), true],
        ["Round trip", ms(one.roundTripMs), true],
        // How good each way can sound, of 4.4 (ITU-T G.107).
        ["MOS out, in", one.mos == null && one.receivedMos == null ? null : [one.mos, one.receivedMos].map(score => score?.toFixed(1) ?? "–").join(", "), true],
        ["Gaps", one.underruns, true],
        ["", el("span", { class: "row" },
          act(one, "Interrupt", () => api("POST", `/v1/calls/${one.id}/interrupt`)),
          act(one, one.held ? "Resume" : "Hold", () => api("POST", `/v1/calls/${one.id}/${one.held ? "resume" : "hold"}`)),
          act(one, "Hang up", () => api("DELETE", `/v1/calls/${one.id}`)))],
      ]),
    ),
  );
  if (focus) [...$("calls").querySelectorAll("button")].find(button => button.getAttribute("aria-label") === focus)?.focus();
}

$("dial").onsubmit = attempt(async () => {
  const { id } = await api("POST", "/v1/calls", { to: $("dial-to").value.trim(), agent: $("dial-agent").value.trim() || undefined });
  note("call", `placed ${id}`);
});
