// The console: everything here comes from the public API and from /v1/events.

import { CallError, connect, devices as audioDevices } from "/antiphon.js";

const $ = id => document.getElementById(id);
const POLL = 2_000;
const KEPT_EVENTS = 200;
const KEPT_TURNS = 12;
const KEPT_SAMPLES = 120;

// ---- small helpers ----

const token = () => $("token").value.trim();
const headers = extra => (token() ? { ...extra, Authorization: "Bearer " + token() } : { ...extra });

async function api(method, path, body) {
  const json = body !== undefined && !(body instanceof FormData);
  const response = await fetch(path, {
    method,
    headers: headers(json ? { "Content-Type": "application/json" } : {}),
    body: json ? JSON.stringify(body) : body,
  }).catch(() => {
    throw new CallError("the gateway does not answer", { code: "unreachable" });
  });
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    // plain text
  }
  if (!response.ok && response.status !== 503) throw new CallError(value?.error?.message ?? `${response.status}: ${text.slice(0, 200)}`, { status: response.status });
  if (response.status === 503 && value?.error) throw new CallError(value.error.message, { status: 503 });
  return value ?? text;
}

/** An element with properties and children; text is never markup. */
function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

function problem(error) {
  const note = $("problem");
  note.hidden = !error;
  note.textContent = error ? (error.status === 401 ? "This gateway wants an access token: enter it above." : error.message) : "";
}

const attempt = work => async event => {
  event?.preventDefault?.();
  try {
    problem(null);
    await work(event);
  } catch (error) {
    problem(error);
  }
};

const ms = value => (value == null ? "–" : Math.round(value) + " ms");
const seconds = value => {
  const s = Math.round(value);
  return s < 60 ? s + " s" : `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
};
const bytes = value => (value >= 1e9 ? (value / 1e9).toFixed(1) + " GB" : Math.round(value / 1e6) + " MB");

function confirmed(question, yes) {
  $("confirm-text").textContent = question;
  $("confirm-yes").textContent = yes;
  const dialog = $("confirm");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(done => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

// ---- tabs ----

const tabs = [...$("tabs").querySelectorAll("[role=tab]")];
const refreshers = {};
function show(tab, focus) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", "#" + tab.id.slice(4));
  refreshers[tab.id]?.().catch(problem);
}
for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const target = step ? tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length] : { Home: tabs[0], End: tabs.at(-1) }[event.key];
    if (target) {
      event.preventDefault();
      show(target, true);
    }
  });
}
const shown = id => !$("panel-" + id).hidden;

// ---- talk ----

let call = null;
const captions = new Map();

function callControls() {
  const live = call && call.state !== "ended";
  $("call").disabled = !!live;
  for (const id of ["hang", "mute", "speak", "interrupt"]) $(id).disabled = !live;
  for (const key of $("keys").children) key.disabled = !live;
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

$("call").onclick = attempt(async () => {
  $("call").disabled = true;
  $("captions").replaceChildren();
  captions.clear();
  const wanted = $("use-microphone").checked ? $("microphone").value || true : false;
  const options = { agent: $("agent").value.trim() || undefined, token: token() || undefined, speaker: $("speaker").value || undefined };
  try {
    $("state").textContent = "connecting";
    try {
      call = await connect({ ...options, microphone: wanted });
    } catch (error) {
      if (error.code !== "microphone" && error.code !== "insecure_page") throw error;
      problem(new Error(error.message + ". You can listen and type."));
      call = await connect({ ...options, microphone: false });
    }
  } finally {
    callControls();
  }
  const mine = call;
  mine.addEventListener("state", callControls);
  mine.addEventListener("ended", ({ detail }) => {
    note("call", `ended: ${detail.reason}`);
    callControls();
    for (const id of ["level-in", "level-out"]) $(id).value = -60;
  });
  mine.addEventListener("level", ({ detail }) => {
    $("level-in").value = detail.input;
    $("level-out").value = detail.output;
  });
  mine.addEventListener("blocked", () => ($("blocked").hidden = false));
  mine.addEventListener("caption", ({ detail }) => caption(detail));
  callControls();
  listDevices().catch(() => {});
});
$("hang").onclick = () => call?.hangUp();
$("mute").onclick = () => call?.mute(!call.muted);
$("play").onclick = attempt(async () => {
  await call.play();
  $("blocked").hidden = true;
});
$("microphone").onchange = attempt(async () => {
  if (call && call.state !== "ended" && $("use-microphone").checked) await call.setMicrophone($("microphone").value || true);
});
$("speaker").onchange = attempt(async () => {
  if (call && call.state !== "ended") await call.setSpeaker($("speaker").value);
});
$("say").onsubmit = attempt(async () => {
  const text = $("text").value;
  const id = await call.say(text, { interrupt: true });
  texts.set(id, text);
  caption({ who: "agent", id, text, heard: "", final: false });
});
$("interrupt").onclick = attempt(() => call.interrupt());
for (const key of "123456789*0#") {
  $("keys").append(el("button", { type: "button", textContent: key, disabled: true, onclick: attempt(() => call.digits(key)) }));
}

/** One line of the transcript; what was not heard is struck through once that is known. */
function caption({ who, id, text, heard, final, how }) {
  const known = captions.get(id) ?? { text: "", heard: "" };
  if (text) known.text = text;
  if (heard) known.heard = heard;
  const whole = known.text || known.heard;
  if (!whole) return;
  const line = known.line ?? $("captions").appendChild(el("p", { class: who }));
  known.line = line;
  const said = final ? known.heard : whole;
  const rest = final && known.text.startsWith(said) ? known.text.slice(said.length) : "";
  line.replaceChildren(el("small", { textContent: who === "caller" ? "you" : "agent" }), said, rest ? el("del", { textContent: rest }) : "");
  if (final && how && how !== "done") line.append(el("small", { textContent: how }));
  captions.set(id === "caller" && final ? Symbol(id) : id, known);
  if (id === "caller" && final) captions.delete("caller");
  $("captions").scrollTop = $("captions").scrollHeight;
}

async function callFigures() {
  if (!call?.id || call.state === "ended") return;
  const stats = await call.stats();
  $("rtt").textContent = ms(stats.roundTripMs);
  $("lost").textContent = stats.received ? `${stats.lost} of ${stats.received + stats.lost}` : "–";
}

// ---- turns as waterfalls ----

const turns = new Map();
const texts = new Map();
function turnEvent(event) {
  const key = event.callId + event.utteranceId;
  const turn = turns.get(key) ?? { call: event.callId, id: event.utteranceId };
  if (event.event === "firstAudio") Object.assign(turn, { first: event.afterMs, phases: event.phases });
  else if (event.event === "turnEnded" || event.event === "interrupted") {
    turn.heard = event.heard?.text ?? turn.heard;
    turn.sent = event.heard?.sentMs ?? turn.sent;
    turn.how = event.event === "interrupted" ? "interrupted" : (turn.how ?? event.how);
  } else if (event.event === "underrun") turn.gaps = (turn.gaps ?? 0) + 1;
  else return;
  turns.delete(key);
  turns.set(key, turn);
  while (turns.size > KEPT_TURNS) turns.delete(turns.keys().next().value);
  if (call && event.callId === call.id && event.event === "firstAudio") $("first").textContent = ms(event.afterMs);
  if (shown("talk")) drawTurns();
}

function drawTurns() {
  const list = [...turns.values()].reverse();
  if (!list.length) return;
  const longest = Math.max(...list.map(turn => (turn.first ?? 0) + (turn.sent ?? 0)), 1);
  $("turns").replaceChildren(
    el("ul", { class: "legend" }, ...[["k1", "wait for first packet"], ["k2", "speech that left"]].map(([k, name]) => el("li", {}, el("i", { class: k }), name))),
    ...list.map(turn => {
      const bar = el("div", { class: "bar", "aria-hidden": "true" });
      // Widths by the CSSOM: an inline style attribute would need a weaker content policy.
      for (const [k, value] of [["k1", turn.first ?? 0], ["k2", turn.sent ?? 0]]) {
        const part = el("i", { class: k });
        part.style.width = (100 * value) / longest + "%";
        bar.append(part);
      }
      const figures = `first packet ${ms(turn.first)} · spoken ${turn.sent == null ? "…" : seconds(turn.sent / 1e3)}` + (turn.gaps ? ` · ${turn.gaps} gaps` : "") + (turn.how && turn.how !== "done" ? ` · ${turn.how}` : "");
      const text = texts.get(turn.id) ?? turn.heard ?? turn.id;
      return el("div", { class: "turn" }, el("span", { textContent: text, title: text }), el("div", {}, bar, el("span", { class: "figures-line", textContent: figures })));
    }),
  );
}

// ---- calls ----

function row(cells) {
  return el("tr", {}, ...cells.map(([label, value, number]) => el("td", { "data-label": label, class: number ? "num" : "" }, value instanceof Node ? value : String(value ?? "–"))));
}

function drawCalls(list) {
  $("calls-count").textContent = list.length;
  if (call) {
    const mine = list.find(one => one.id === call.id);
    if (mine) $("gaps").textContent = mine.underruns;
  }
  if (!shown("calls")) return;
  const act = (one, name, work) => el("button", { class: "small", type: "button", textContent: name, "aria-label": `${name} ${one.from}`, onclick: attempt(work) });
  $("calls").tBodies[0].replaceChildren(
    ...list.map(one =>
      row([
        ["Call", one.id.slice(0, 8)],
        ["Leg", `${one.leg}, ${one.codec ?? one.state}`],
        ["From", one.from],
        ["Agent", one.agent],
        ["State", one.held ? "held" : one.speaking ? "speaking" : one.callerSpeaking ? "listening" : one.state],
        ["Length", seconds(one.durationMs / 1e3), true],
        ["First audio", ms(one.firstAudioMs), true],
        ["Lost", `${(100 * (one.fractionLost ?? 0)).toFixed(1)} %`, true],
        ["Round trip", ms(one.roundTripMs), true],
        ["Gaps", one.underruns, true],
        ["", el("span", { class: "row" },
          act(one, "Interrupt", () => api("POST", `/v1/calls/${one.id}/interrupt`)),
          act(one, one.held ? "Resume" : "Hold", () => api("POST", `/v1/calls/${one.id}/${one.held ? "resume" : "hold"}`)),
          act(one, "Hang up", () => api("DELETE", `/v1/calls/${one.id}`)))],
      ]),
    ),
  );
}

$("dial").onsubmit = attempt(async () => {
  const { id } = await api("POST", "/v1/calls", { to: $("dial-to").value.trim(), agent: $("dial-agent").value.trim() || undefined });
  note("call", `placed ${id}`);
});

function note(kind, text) {
  if ($("pause-events").checked) return;
  const log = $("events");
  log.prepend(el("div", { textContent: `${new Date().toLocaleTimeString()}  ${kind}  ${text}` }));
  while (log.childElementCount > KEPT_EVENTS) log.lastChild.remove();
}

// ---- scheduler ----

const history_ = new Map();
const svg = (name, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

function spark(values, label, second) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, n) => `${(100 * n) / (KEPT_SAMPLES - 1)},${30 - (28 * Math.max(v, 0)) / top}`).join(" ");
  const drawing = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: second ? "spark second" : "spark", role: "img", "aria-label": `${label}, now ${values.at(-1)}, most ${top} in two minutes` });
  drawing.append(svg("polyline", { points }));
  return el("figure", { class: "plain" }, el("figcaption", { class: "hint", textContent: label }), drawing);
}

function drawDevices(list) {
  for (const [n, device] of list.entries()) {
    const key = device.device ?? "device " + n;
    const kept = history_.get(key) ?? { live: [], queued: [] };
    for (const name of ["live", "queued"]) kept[name] = [...kept[name], device[name] ?? 0].slice(-KEPT_SAMPLES);
    history_.set(key, kept);
  }
  if (!shown("devices")) return;
  $("devices").replaceChildren(
    ...list.map((device, n) => {
      const key = device.device ?? "device " + n;
      const kept = history_.get(key);
      const figure = (name, value) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value ?? "–" }));
      const parts = Object.entries(device.memoryParts ?? {}).sort((a, b) => b[1] - a[1]);
      const shade = at => "k" + Math.min(at + 1, 5);
      const bar = el("div", { class: "bar", role: "img", "aria-label": "device memory by part" });
      for (const [at, [, value]] of parts.entries()) {
        const part = el("i", { class: shade(at) });
        part.style.width = (100 * value) / (device.memoryTotal || parts.reduce((sum, [, v]) => sum + v, 0) || 1) + "%";
        bar.append(part);
      }
      const slack = device.slackSeconds;
      return el("div", { class: "card" },
        el("h2", {}, key, " ", el("span", { class: "pill " + (device.state === "ready" ? "good" : device.state === "failed" ? "bad" : ""), textContent: `${device.engine ?? ""} ${device.state}` })),
        device.error ? el("p", { class: "note bad", textContent: device.error }) : null,
        el("dl", { class: "figures" },
          figure("live streams of capacity", `${device.live} of ${device.capacity ?? device.places ?? "–"}`),
          figure("sustainable streams", device.sustainableStreams ?? device.carries),
          figure("batch", device.batch), figure("queued", device.queued),
          figure("load", device.load == null ? null : Math.round(100 * device.load) + " %"),
          figure("least slack", slack == null ? null : slack.toFixed(2) + " s"),
          figure("memory", device.memoryTotal ? `${bytes(device.memoryUsed)} of ${bytes(device.memoryTotal)}` : null),
          figure("failures", device.failures)),
        spark(kept.live, "live streams, two minutes"), spark(kept.queued, "queued, two minutes", true),
        parts.length ? bar : null,
        parts.length ? el("ul", { class: "legend" }, ...parts.slice(0, 8).map(([name, value], at) => el("li", {}, el("i", { class: shade(at) }), `${name} ${bytes(value)}`))) : null);
    }),
  );
}

// ---- batch ----

async function drawJobs() {
  const page = await api("GET", "/v1/jobs?limit=50");
  const jobs = page.jobs ?? [];
  if (!jobs.length) return;
  $("jobs").replaceChildren(
    ...jobs.map(job => {
      const over = ["done", "failed", "cancelled"].includes(job.state);
      const left = job.state === "running" && job.etaSeconds != null ? `, ${seconds(job.etaSeconds)} left` : "";
      return el("div", { class: "job" },
        el("div", {}, el("span", { textContent: `${job.id.slice(0, 8)} · ${job.state} · ${job.finished} of ${job.total}${left}` }), over ? null : el("progress", { max: job.total, value: job.finished, "aria-label": "progress" })),
        job.state === "done" ? el("button", { class: "small", textContent: "Listen", onclick: attempt(() => play(`/v1/jobs/${job.id}/audio`)) }) : null,
        over ? null : el("button", { class: "small", textContent: "Cancel", onclick: attempt(async () => { await api("DELETE", `/v1/jobs/${job.id}`); await drawJobs(); }) }));
    }),
  );
}
$("job").onsubmit = attempt(async () => {
  const items = $("job-text").value.split("\n").map(line => line.trim()).filter(Boolean);
  await api("POST", "/v1/audio/speech/batch", { items, voice: $("job-voice").value || undefined, response_format: $("job-format").value });
  $("job-text").value = "";
  await drawJobs();
});
refreshers["tab-batch"] = async () => {
  await Promise.all([drawJobs(), drawVoices()]);
};

// ---- voices ----

async function play(path, body) {
  const response = await fetch(path, body ? { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) } : { headers: headers() });
  if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
  const player = $("listen");
  if (player.src) URL.revokeObjectURL(player.src);
  player.src = URL.createObjectURL(await response.blob());
  player.hidden = false;
  if (!shown("voices")) show($("tab-voices"));
  await player.play();
}

async function drawVoices() {
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
        el("button", { class: "small", textContent: "Listen", "aria-label": "Listen to " + voice.name, onclick: attempt(() => play("/v1/audio/speech", { model: "tts-1", input: $("sample").value, voice: voice.name, response_format: "wav" })) }),
        enrolled ? el("button", { class: "small danger", textContent: "Remove", "aria-label": "Remove " + voice.name, onclick: attempt(async () => {
          if (await confirmed(`Remove the voice ${voice.name}? Calls that ask for it are refused from then on.`, "Remove")) {
            await api("DELETE", "/v1/audio/voices/" + encodeURIComponent(voice.name));
            await drawVoices();
          }
        }) }) : null);
    }),
  );
}
refreshers["tab-voices"] = drawVoices;

let recorder = null;
let recorded = null;
$("record").onclick = attempt(async () => {
  if (recorder) return recorder.stop();
  if (!navigator.mediaDevices) throw new Error("the browser gives a microphone to pages on HTTPS or localhost only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false } });
  const pieces = [];
  const started = performance.now();
  recorder = new MediaRecorder(stream);
  recorder.ondataavailable = event => pieces.push(event.data);
  const clock = setInterval(() => {
    const length = (performance.now() - started) / 1e3;
    $("recording").textContent = `recording, ${length.toFixed(0)} s of 30`;
    if (length >= 30) recorder?.stop();
  }, 250);
  recorder.onstop = () => {
    clearInterval(clock);
    for (const track of stream.getTracks()) track.stop();
    recorded = new Blob(pieces, { type: recorder.mimeType });
    recorder = null;
    $("record").textContent = "Record";
    $("record").setAttribute("aria-pressed", "false");
    const length = (performance.now() - started) / 1e3;
    $("recording").textContent = length < 3 ? "shorter than 3 seconds: record again" : `${length.toFixed(1)} s recorded`;
  };
  recorder.start();
  $("record").textContent = "Stop";
  $("record").setAttribute("aria-pressed", "true");
});
$("enrol").onsubmit = attempt(async () => {
  const sample = $("voice-file").files[0] ?? recorded;
  if (!sample) throw new Error("record a sample or choose a file first");
  const form = new FormData();
  form.set("name", $("voice-name").value.trim());
  form.set("ref_text", $("voice-text").value.trim());
  form.set("consent", "given in the console on " + new Date().toISOString());
  form.set("audio_sample", sample, sample.name ?? "sample.webm");
  const note = $("enrolled");
  note.hidden = false;
  note.className = "note";
  note.textContent = "enrolling…";
  try {
    const added = await api("POST", "/v1/audio/voices", form);
    const warnings = added.quality?.warnings ?? added.warnings ?? [];
    note.className = "note good";
    note.textContent = `${added.voice?.name ?? "The voice"} is enrolled.` + (warnings.length ? " But: " + warnings.map(w => w.message ?? w).join("; ") : "");
    recorded = null;
    await drawVoices();
  } catch (error) {
    note.className = "note bad";
    note.textContent = error.message;
  }
});

// ---- operations ----

function drawReadiness(ready) {
  const health = $("health");
  const draining = ready.draining;
  health.textContent = draining ? "draining" : ready.ready ? "ready" : "not ready";
  health.className = "pill " + (ready.ready && !draining ? "good" : "bad");
  if (!shown("operate")) return;
  const figure = (name, value) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }));
  $("readiness").replaceChildren(figure("takes calls", ready.ready ? "yes" : "no"), figure("draining", draining ? "yes" : "no"), figure("live calls", ready.calls), figure("devices ready", `${ready.devices.filter(d => d.state === "ready").length} of ${ready.devices.length}`));
}
$("drain").onclick = attempt(async () => {
  if (await confirmed("Drain this gateway? It refuses new calls from now on, until it is restarted.", "Drain")) {
    const done = await api("POST", "/v1/admin/drain");
    note("gateway", `drained ${done.drained} calls, ${done.cutOff} cut off`);
  }
});
async function loadMetrics() {
  const text = await api("GET", "/metrics");
  const wanted = $("filter").value.trim();
  $("metrics").textContent = String(text).split("\n").filter(line => line && !line.startsWith("#") && line.includes(wanted)).join("\n");
}
$("load-metrics").onclick = attempt(loadMetrics);
$("filter").onchange = attempt(loadMetrics);
refreshers["tab-operate"] = loadMetrics;

// ---- what keeps the page up to date ----

/** Server-sent events by `fetch`, since an EventSource can send no token. */
async function follow() {
  for (;;) {
    try {
      const response = await fetch("/v1/events", { headers: headers() });
      if (!response.ok) throw new CallError("", { status: response.status });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) dispatch(block);
      }
    } catch (error) {
      if (error.status === 401) problem(error);
    }
    await new Promise(done => setTimeout(done, POLL));
  }
}

function dispatch(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data += line.slice(5).trim();
  }
  if (!data) return;
  const value = JSON.parse(data);
  if (name === "scheduler") return drawDevices(value.devices);
  if (name === "lagged") return note("events", `${value.lost} events were lost: this page was too slow`);
  turnEvent(value);
  const { event, callId, ...rest } = value;
  note(callId?.slice(0, 8) ?? "", `${event} ${JSON.stringify(rest)}`);
}

async function poll() {
  try {
    drawReadiness(await api("GET", "/readyz"));
  } catch {
    $("health").textContent = "no answer";
    $("health").className = "pill bad";
  }
  try {
    drawCalls((await api("GET", "/v1/calls")).calls);
    if (shown("batch")) await drawJobs();
    await callFigures();
  } catch (error) {
    if (error.status === 401) problem(error);
  }
  setTimeout(poll, POLL);
}

$("access").onsubmit = event => event.preventDefault();
$("token").onchange = () => problem(null);
addEventListener("pagehide", () => call?.hangUp());
show(tabs.find(tab => "#" + tab.id.slice(4) === location.hash) ?? tabs[0]);
callControls();
listDevices().catch(() => {});
poll();
follow();
