// The console: everything here comes from the public API and from /v1/events. This file keeps the panels up to date.

import { CallError } from "/antiphon.js";
import { $, access, api, isLocked, note, refreshers, request, show, shown } from "/console/base.js";
import { drawJobs } from "/console/batch.js";
import { drawCalls } from "/console/calls.js";
import { drawReadiness } from "/console/operate.js";
import "/console/records.js";
import { deviceCount, draw as drawScheduler, drawDevices, drawStages, drawTimeline } from "/console/scheduler.js";
import { figures, firstAudio } from "/console/talk.js";
import { turnEvent } from "/console/turns.js";
import "/console/voices.js";

const POLL = 2_000;
/** What this token may not do is not asked for again and again: routes that answered 403 to it. */
const denied = new Set();
access.addEventListener("change", () => denied.clear());

const pause = () => new Promise(done => setTimeout(done, POLL));

/** A request that is made again and again; nothing where the token does not reach that far. */
async function look(path) {
  if (isLocked() || denied.has(path)) return null;
  try {
    return await api("GET", path, undefined, true);
  } catch (error) {
    if (error.status === 403) denied.add(path);
    return null;
  }
}

/** Server-sent events by `fetch`, since an EventSource can send no token. */
async function follow() {
  for (;;) {
    try {
      if (!isLocked() && !denied.has("/v1/events")) {
        const response = await request("GET", "/v1/events", { quiet: true });
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          const blocks = (rest + value).split("\n\n");
          rest = blocks.pop();
          for (const block of blocks) dispatch(block);
        }
      }
    } catch (error) {
      if (error instanceof CallError && error.status === 403) denied.add("/v1/events");
    }
    await pause();
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
  if (name === "trunks") return note("trunks", value.trunks.map(trunk => `${trunk.name} ${trunk.up ? "up" : "down"}`).join(", "));
  // Events of a newer gateway that this page does not know.
  if (!value.event) return;
  turnEvent(value);
  if (value.event === "firstAudio") firstAudio(value);
  const { event, callId, ...rest } = value;
  // Microseconds of milliseconds tell a reader nothing.
  const short = (_, one) => (typeof one === "number" && !Number.isInteger(one) ? Math.round(one * 10) / 10 : one);
  note(callId?.slice(0, 8) ?? "", `${event} ${JSON.stringify(rest, short)}`);
}

/** What the scheduler's panel shows that no event tells. */
async function scheduler() {
  const metrics = await look("/metrics");
  if (metrics) drawStages(metrics);
  for (let at = 0; at < deviceCount(); at++) {
    const steps = await look(`/v1/devices/${at}/steps`);
    if (steps) drawTimeline(at, steps);
  }
  drawScheduler();
}
refreshers.devices = async () => {
  drawScheduler();
  await scheduler();
};

async function poll() {
  for (;;) {
    try {
      drawReadiness(await api("GET", "/readyz"));
    } catch {
      $("health").textContent = "no answer";
      $("health").className = "pill bad";
    }
    try {
      const calls = (await look("/v1/calls"))?.calls;
      if (calls) drawCalls(calls);
      await figures(calls);
      if (shown("batch") && !isLocked()) await drawJobs(true);
      if (shown("devices")) await scheduler();
    } catch {
      // The next look may find more; what somebody asked for tells its own errors.
    }
    await pause();
  }
}

show(location.hash.slice(1));
poll();
follow();
