// What happened on calls that are over: their figures and what was said.

import { $, address, api, attempt, el, figure, ms, percent, play, refreshers, row, seconds } from "/console/base.js";

const PAGE = 25;
let last = null;

async function load(more) {
  const query = new URLSearchParams({ limit: PAGE });
  for (const [name, id] of [["party", "record-party"], ["agent", "record-agent"], ["direction", "record-direction"]]) {
    if ($(id).value.trim()) query.set(name, $(id).value.trim());
  }
  if (more && last) query.set("after", last);
  const { records } = await api("GET", "/v1/records?" + query);
  last = records.at(-1)?.id ?? last;
  const body = $("records").tBodies[0];
  if (!more) body.replaceChildren();
  body.append(...records.map(line));
  $("no-records").hidden = body.rows.length > 0;
  $("more-records").hidden = records.length < PAGE;
}

function line(record) {
  return row([
    ["Began", new Date(record.startedMs).toLocaleString()],
    ["Direction", record.direction],
    ["From", address(record.from)],
    ["Agent", record.agent],
    ["Leg", [record.leg, record.codec].filter(Boolean).join(", ") || null],
    ["Length", record.durationMs == null ? "open" : seconds(record.durationMs / 1e3), true],
    ["Ended", [record.cause, told(record)].filter(Boolean).join(", ") || null],
    ["", el("button", { class: "small", type: "button", textContent: "Transcript", "aria-label": `Transcript of the call from ${record.from}`, onclick: attempt(() => show(record.id)) })],
  ]);
}

async function show(id) {
  const record = await api("GET", "/v1/records/" + encodeURIComponent(id));
  const rtp = record.rtp ?? {};
  $("record-figures").replaceChildren(
    figure("turns", record.turns.length), figure("interruptions", record.interruptions), figure("keys", record.digits),
    figure("lost", rtp.fractionLost == null ? null : percent(rtp.fractionLost)), figure("round trip", ms(rtp.roundTripMs)),
    figure("gaps", rtp.underruns), figure("answered by", record.answeredBy), figure("MOS sent", score(rtp.mos)), figure("MOS received", score(rtp.receivedMos)));
  const { recording } = record;
  $("play-record").hidden = !recording;
  $("play-record").textContent = recording ? `Play the recording, ${seconds(recording.durationMs / 1e3)}` : "";
  $("play-record").onclick = attempt(async () => {
    // A dialog would keep the player's controls out of reach.
    $("record-dialog").close();
    await play(`call from ${record.from}`, "GET", `/v1/calls/${encodeURIComponent(id)}/recording`);
  });
  const said = [
    ...record.turns.map(turn => ({ who: "agent", at: turn.atMs, text: turn.heard ?? `${turn.heardWords} words (text is not kept)`, about: [turn.firstAudioMs == null ? null : "first audio " + ms(turn.firstAudioMs), turn.how !== "done" ? turn.how : null] })),
    ...record.prompts.map(prompt => ({ who: "caller", at: prompt.atMs, text: prompt.text ?? `${prompt.chars} characters (text is not kept)`, about: [prompt.lang || null] })),
  ].sort((a, b) => a.at - b.at);
  $("transcript").replaceChildren(...said.map(one => el("p", { class: one.who },
    el("small", { textContent: [one.who, seconds((one.at - record.startedMs) / 1e3), ...one.about].filter(Boolean).join(" · ") }), one.text)));
  $("no-words").hidden = said.length > 0;
  $("record-title").textContent = `${record.from} → ${record.to}`;
  const dialog = $("record-dialog");
  if (!dialog.open) dialog.showModal();
}
/** What signalling says of the end: the status of a call that was never live, and the words of who ended it. */
function told({ answeredMs, sip, peerCause }) {
  const parts = [
    answeredMs == null && sip ? `SIP ${sip.status}` : null,
    peerCause?.q850 ? `Q.850 ${peerCause.q850}` : null,
    peerCause?.sip ? `SIP ${peerCause.sip}` : null,
    peerCause?.text ?? null,
  ];
  return parts.filter(Boolean).join(" ");
}

/** A mean opinion score of 1 to 5, as the E-model estimates it. */
function score(mos) {
  return mos == null ? null : mos.toFixed(2);
}

$("close-record").onclick = () => $("record-dialog").close();

$("record-filter").onsubmit = attempt(() => load(false));
$("more-records").onclick = attempt(() => load(true));
refreshers.records = () => load(false);
