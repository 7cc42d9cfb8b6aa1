// What each device does: streams by class, slack, memory, and where its time goes by stage.

import { $, bytes, el, figure, percent, row, shown, svg } from "/console/base.js";

const KEPT = 120;
const histories = new Map();

function spark(values, label, second) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, n) => `${(100 * n) / (KEPT - 1)},${30 - (28 * Math.max(v, 0)) / top}`).join(" ");
  const drawing = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: second ? "spark second" : "spark", role: "img", "aria-label": `${label}: now ${values.at(-1)}, most ${top < 1e-6 ? 0 : top}` });
  drawing.append(svg("polyline", { points }));
  return el("figure", { class: "plain" }, el("figcaption", { class: "hint", textContent: `${label}, two minutes` }), drawing);
}

export function drawDevices(list) {
  for (const [n, device] of list.entries()) {
    const key = device.device ?? "device " + n;
    const kept = histories.get(key) ?? { live: [], queued: [], load: [] };
    for (const name of ["live", "queued", "load"]) kept[name] = [...kept[name], device[name] ?? 0].slice(-KEPT);
    histories.set(key, kept);
  }
  if (!shown("devices")) return;
  $("devices").replaceChildren(...list.map((device, n) => card(device, device.device ?? "device " + n)));
}

function card(device, key) {
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
      figure("sustainable streams", device.sustainableStreams == null ? null : Math.floor(device.sustainableStreams)),
      figure("batch streams", device.batch), figure("queued", device.queued),
      figure("utilisation", device.load == null ? null : percent(device.load)),
      figure("least slack", slack == null ? null : slack.toFixed(2) + " s"),
      figure("memory", device.memoryTotal ? `${bytes(device.memoryUsed)} of ${bytes(device.memoryTotal)}` : null),
      figure("failures", device.failures)),
    spark(kept.live, "live streams"), spark(kept.queued, "queued", true),
    parts.length ? bar : null,
    parts.length ? el("ul", { class: "legend" }, ...parts.slice(0, 8).map(([name, value], at) => el("li", {}, el("i", { class: shade(at) }), `${name} ${bytes(value)}`))) : null);
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
