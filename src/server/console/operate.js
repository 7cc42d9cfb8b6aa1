// Operations: readiness, the configuration in force, metrics, drain.

import { $, api, attempt, confirmed, el, figure, note, refreshers, row, shown } from "/console/base.js";

export function drawReadiness(ready) {
  const health = $("health");
  health.textContent = ready.draining ? "draining" : ready.ready ? "ready" : "not ready";
  health.className = "pill " + (ready.ready && !ready.draining ? "good" : "bad");
  if (!shown("operate")) return;
  $("readiness").replaceChildren(
    figure("takes calls", ready.ready ? "yes" : "no"), figure("draining", ready.draining ? "yes" : "no"), figure("live calls", ready.calls),
    figure("devices ready", `${ready.devices.filter(d => d.state === "ready").length} of ${ready.devices.length}`));
  $("faults").replaceChildren(...(ready.faults ?? []).map(fault => el("li", { textContent: `${fault.part}: ${fault.reason}` })));
  // One takes the other's place; the keyboard stays there.
  const held = [$("drain"), $("undrain")].includes(document.activeElement);
  $("drain").hidden = ready.draining;
  $("undrain").hidden = !ready.draining;
  if (held) $(ready.draining ? "undrain" : "drain").focus();
}

/** What each gateway has told of its devices and trunks, where there are several; one that is silent is gone. */
const gateways = new Map();
const SILENT = 5_000;

export function gatewayTold({ node, devices, trunks }) {
  if (!node) return;
  const now = performance.now();
  const known = gateways.get(node) ?? {};
  gateways.set(node, { devices: devices ?? known.devices ?? [], trunks: trunks ?? known.trunks ?? [], at: now });
  for (const [other, one] of gateways) if (now - one.at > SILENT) gateways.delete(other);
  if (!shown("operate")) return;
  const sorted = [...gateways].sort(([a], [b]) => a.localeCompare(b));
  $("gateways").replaceChildren(...sorted.map(([name, one]) => {
    const ready = one.devices.filter(device => device.state === "ready").length;
    const live = one.devices.reduce((sum, device) => sum + (device.live ?? 0), 0);
    const lines = one.trunks.map(trunk => `${trunk.name} ${trunk.up ? "up" : "down"}`).join(", ");
    return el("li", { textContent: `${name}: ${ready} of ${one.devices.length} devices ready, ${live} live streams${lines ? `; trunks: ${lines}` : ""}` });
  }));
}

$("drain").onclick = attempt(async () => {
  if (await confirmed("Drain this gateway? It refuses new calls and lets live ones finish.", "Drain")) {
    const done = await api("POST", "/v1/admin/drain");
    note("gateway", `drained ${done.drained} calls, ${done.cutOff} cut off`);
  }
});
$("undrain").onclick = attempt(() => api("DELETE", "/v1/admin/drain"));

// ---- the configuration ----

let settings = [];

function drawSettings() {
  const wanted = $("setting-filter").value.trim().toLowerCase();
  const only = $("only-set").checked;
  const list = settings.filter(one => (!only || one.isSet) && (!wanted || `${one.key} ${one.description ?? ""}`.toLowerCase().includes(wanted)));
  $("settings").tBodies[0].replaceChildren(...list.map(one => row([
    ["Key", el("code", { textContent: one.key })],
    ["Value", el("code", { textContent: one.value == null ? "not set" : JSON.stringify(one.value) })],
    ["From", one.isSet ? "set" : "default"],
    ["What it is", one.description ?? ""],
  ])));
  $("settings-count").textContent = `${list.length} of ${settings.length} keys`;
}

async function loadSettings() {
  const config = await api("GET", "/v1/admin/config");
  settings = config.settings;
  $("config-file").textContent = config.file ?? "none: defaults and environment";
  drawSettings();
}
$("setting-filter").oninput = drawSettings;
$("only-set").onchange = drawSettings;
$("reload").onclick = attempt(async () => {
  const done = await api("POST", "/v1/admin/reload");
  const told = (name, keys) => (keys.length ? `${name}: ${keys.join(", ")}. ` : "");
  $("reloaded").textContent = told("In force now", done.applied) + told("After a restart", done.needsRestart) || "Nothing has changed.";
  await loadSettings();
});

// ---- metrics ----

async function loadMetrics() {
  const text = await api("GET", "/metrics");
  const wanted = $("filter").value.trim();
  $("metrics").textContent = String(text).split("\n").filter(line => line && !line.startsWith("#") && line.includes(wanted)).join("\n");
}
$("metrics-form").onsubmit = attempt(loadMetrics);

refreshers.settings = loadSettings;
refreshers.operate = loadMetrics;
