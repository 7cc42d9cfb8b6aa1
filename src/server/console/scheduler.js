// What each device does: streams by class, slack, memory, its latest steps on a timeline, and where its time goes by stage.

import { $, bytes, el, figure, percent, row, shown, svg } from "/console/base.js";

const KEPT = 120;
const KINDS = [["live", "live streams"], ["batch", "batch streams"], ["queued", "queued"], ["slackSeconds", "least slack, s"]];
const histories = new Map();
/** A gateway that has told nothing for so long, ms, is gone. */
const SILENT = 5_000;
/** With many gateways, drawn no more often than that, ms. */
const REST = 400;
const gateways = new Map();
let drawnAt = 0;
/** The gateway that answers this page's requests; empty where there is one. */
let own = "";
export const answering = node => (own = node ?? "");

/** A figure over two minutes, now at the right; where there was none, the line has a hole. */
function spark(values, label, second) {
  const known = values.filter(value => value != null);
  const top = Math.max(...known, 1e-9);
  const round = value => (value == null ? "–" : Number.isInteger(value) ? value : value.toFixed(2));
  const drawing = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: second ? "spark second" : "spark", role: "img", "aria-label": `${label}: now ${round(values.at(-1))}, most ${known.length ? round(Math.max(...known)) : "–"}` });
  let points = [];
  for (const [n, value] of [...values, null].entries()) {
    if (value != null) points.push(`${100 - (100 * (values.length - 1 - n)) / (KEPT - 1)},${29 - (27 * Math.max(value, 0)) / top}`);
    else if (points.length) drawing.append(svg("polyline", { points: points.splice(0).join(" ") }));
  }
  return el("figure", { class: "plain" }, el("figcaption", { class: "hint", textContent: `${label}: ${round(values.at(-1))}`, title: "two minutes, now at the right" }), drawing);
}

/** What every device is now, once a second. `node`: whose devices these are, where there are several gateways. */
export function drawDevices(list, node = "") {
  const now = performance.now();
  gateways.set(node, { list, at: now });
  for (const [other, one] of gateways) if (now - one.at > SILENT) gateways.delete(other);
  for (const [n, device] of list.entries()) {
    const key = named(node, device, n);
    const kept = histories.get(key) ?? Object.fromEntries(KINDS.map(([name]) => [name, []]));
    for (const [name] of KINDS) kept[name] = [...kept[name], device[name] ?? (name === "slackSeconds" ? null : 0)].slice(-KEPT);
    histories.set(key, kept);
  }
  if (gateways.size > 1 && now - drawnAt < REST) return;
  draw();
}

/** A device's name; of several gateways with that of its own. */
const named = (of, device, n) => (of ? `${of}: ` : "") + (device.device ?? "device " + n);

/** At once when the panel is opened, with what was known last. */
export function draw() {
  if (!shown("devices")) return;
  drawnAt = performance.now();
  const sorted = [...gateways].sort(([a], [b]) => a.localeCompare(b));
  // Steps are known of the gateway that answers.
  const place = (of, n) => (of === own ? n : -1);
  $("devices").replaceChildren(...sorted.flatMap(([of, one]) => one.list.map((device, n) => card(device, named(of, device, n), place(of, n)))));
}

function card(device, key, at) {
  const kept = histories.get(key);
  const parts = Object.entries(device.memoryParts ?? {}).sort((a, b) => b[1] - a[1]);
  const shade = at => "k" + Math.min(at + 1, 5);
  const all = device.memoryTotal || parts.reduce((sum, [, v]) => sum + v, 0) || 1;
  const bar = el("div", { class: "bar", role: "img", "aria-label": "device memory: " + parts.map(([name, value]) => `${name} ${bytes(value)}`).join(", ") });
  for (const [at, [, value]] of parts.entries()) {
    const part = el("i", { class: shade(at) });
    part.style.width = (100 * value) / all + "%";
    bar.append(part);
  }
  const slack = device.slackSeconds;
  return el("div", { class: "card" },
    el("h2", {}, key, " ", el("span", { class: "pill " + (device.state === "ready" ? "good" : device.state === "failed" ? "bad" : ""), textContent: `${device.engine ?? ""} ${device.state}` })),
    device.error ? el("p", { class: "note bad", textContent: device.error }) : null,
    el("dl", { class: "figures" },
      figure("live streams of capacity", device.capacity == null ? device.live : `${device.live} of ${device.capacity}`),
      figure("sustainable streams", !device.sustainableStreams ? null : Math.floor(device.sustainableStreams)),
      figure("batch streams", device.batch), figure("queued", device.queued),
      figure("utilisation", device.load == null ? null : percent(device.load)),
      figure("least slack", slack == null ? null : slack.toFixed(2) + " s"),
      figure("memory", device.memoryTotal ? `${bytes(device.memoryUsed)} of ${bytes(device.memoryTotal)}` : null),
      figure("failures", device.failures)),
    el("div", { class: "sparks" }, ...KINDS.map(([name, label], n) => spark(kept[name], label, n % 2))),
    timelines.get(at) ?? null,
    parts.length ? bar : null,
    parts.length ? el("ul", { class: "legend" }, ...parts.slice(0, 8).map(([name, value], at) => el("li", {}, el("i", { class: shade(at) }), `${name} ${bytes(value)}`))) : null);
}

// ---- the latest steps, a lane a stage; and the slack ----

/** The drawing of each device, kept from one look to the next: cards are drawn anew with every event. */
const timelines = new Map();
/** How much of the past is shown, in milliseconds; a device that did nothing since shows what it did last. */
const SPAN = 10_000;
const LANE = 22;
/** Looks at the slack are 250 ms apart, while there is any. */
const HOLE = 1_000;
const STAGES = ["prefill", "decode", "flow", "vocode"];

export const deviceCount = () => gateways.get(own)?.list.length ?? 0;

export function drawTimeline(at, { elsewhere, steps, slack }) {
  if (elsewhere || !steps.length) return timelines.set(at, el("p", { class: "hint", textContent: elsewhere ? "A worker on another machine does not tell its steps." : "No step yet." }));
  const end = Math.max(...steps.map(step => step.beganMs + step.lastedMs), slack.at(-1)?.atMs ?? 0);
  const from = Math.max(end - SPAN, steps[0].beganMs);
  const width = 1000;
  const x = when => (width * (when - from)) / Math.max(end - from, 1);
  const recent = steps.filter(step => step.beganMs + step.lastedMs >= from);
  const lanes = STAGES.filter(stage => recent.some(step => step.stage === stage));
  const most = Math.max(...recent.map(step => step.live + step.batch), 1);
  const looks = slack.filter(look => look.atMs >= from);
  const height = LANE * (lanes.length + (looks.length > 1 ? 2 : 0));
  const told = lanes.map(stage => `${stage} ${recent.filter(step => step.stage === stage).length}`).join(", ");
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "timeline", role: "img", "aria-label": `steps of ${((end - from) / 1e3).toFixed(1)} s: ${told}` });
  for (const step of recent) {
    const left = Math.max(x(step.beganMs), 0);
    // As high as the step was wide.
    const tall = Math.max(4, (LANE - 3) * ((step.live + step.batch) / most));
    const rect = svg("rect", {
      x: left, y: LANE * (lanes.indexOf(step.stage) + 1) - 1 - tall, height: tall,
      width: Math.max(x(step.beganMs + step.lastedMs) - left, 1), class: step.live && step.batch ? "both" : step.batch ? "batch" : "live",
    });
    rect.append(svg("title", {}, `${step.stage}, ${step.lastedMs.toFixed(2)} ms, ${step.live} live and ${step.batch} batch rows, ${step.rounds} rounds`));
    drawing.append(rect);
  }
  const floor = LANE * lanes.length;
  if (looks.length > 1) {
    const top = Math.max(...looks.map(look => look.seconds), 0.1);
    const y = value => floor + 2 * LANE - 2 - ((2 * LANE - 6) * Math.max(value, 0)) / top;
    let points = [];
    for (const [n, look] of looks.entries()) {
      // While nobody is spoken to there is no slack.
      if (n && look.atMs - looks[n - 1].atMs > HOLE) drawing.append(svg("polyline", { points: points.splice(0).join(" ") }));
      points.push(`${x(look.atMs)},${y(look.seconds)}`);
    }
    drawing.append(svg("polyline", { points: points.join(" ") }));
  }
  const names = el("div", { class: "lanes", "aria-hidden": "true" }, ...lanes.map(stage => el("span", { textContent: stage })));
  if (looks.length > 1) names.append(el("span", { class: "tall", textContent: `slack, to ${Math.max(...looks.map(look => look.seconds)).toFixed(1)} s` }));
  const legend = [["live", "live"], ["batch", "batch"], ["both", "both in one step"]].map(([k, name]) => el("li", {}, el("i", { class: k }), name));
  const mean = recent.reduce((all, step) => all + step.lastedMs, 0) / recent.length;
  timelines.set(at, el("figure", { class: "plain" },
    el("figcaption", { class: "hint", textContent: `The latest ${recent.length} steps, in ${((end - from) / 1e3).toFixed(1)} s; as high as they have rows, to ${most}. Mean ${mean.toFixed(2)} ms.` }),
    el("div", { class: "lanes-box" }, names, drawing), el("ul", { class: "legend" }, ...legend)));
}

// ---- time by stage, from the difference between two scrapes ----

let before = null;

export function drawStages(text) {
  const now = { at: performance.now(), sums: {}, counts: {} };
  for (const line of String(text).split("\n")) {
    const found = /^antiphon_step_seconds_(sum|count)\{[^}]*stage="([^"]+)"[^}]*\} ([^ ]+)/.exec(line);
    if (!found) continue;
    const into = found[1] === "sum" ? now.sums : now.counts;
    into[found[2]] = (into[found[2]] ?? 0) + Number(found[3]);
  }
  if (before && shown("devices")) {
    const wall = (now.at - before.at) / 1e3;
    const rows = Object.keys(now.sums).map(stage => {
      const time = now.sums[stage] - (before.sums[stage] ?? 0);
      const steps = now.counts[stage] - (before.counts[stage] ?? 0);
      return { stage, time, steps, rate: steps / wall };
    });
    $("no-steps").hidden = rows.length > 0;
    $("no-steps").textContent = "No step has been measured.";
    $("stages").hidden = !rows.length;
    $("stages").tBodies[0].replaceChildren(...rows.map(one => row([
      ["Stage", one.stage],
      ["Steps a second", one.rate.toFixed(1), true],
      ["Mean step", one.steps ? ((1e3 * one.time) / one.steps).toFixed(2) + " ms" : null, true],
      ["Of the time", percent(one.time / wall), true],
    ])));
  }
  before = now;
}
