// The console: everything here comes from the public API and from /v1/events. This file keeps the panels up to date.

import { CallError } from "/antiphon.js";
import { $, access, api, isLocked, note, refreshers, show, shown, told } from "/console/base.js";
import { drawJobs, jobTold } from "/console/batch.js";
import { drawCalls } from "/console/calls.js";
import { drawReadiness, gatewayTold } from "/console/operate.js";
import "/console/records.js";
import { answering, deviceCount, draw as drawScheduler, drawDevices, drawStages, drawTimeline } from "/console/scheduler.js";
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

/** Whether events come: what they tell is not asked for. */
let events = false;

async function follow() {
  for (;;) {
    try {
      if (!isLocked() && !denied.has("/v1/events")) {
        for await (const [name, value] of told("/v1/events")) {
          events = true;
          dispatch(name, value);
        }
      }
    } catch (error) {
      if (error instanceof CallError && error.status === 403) denied.add("/v1/events");
    }
    events = false;
    await pause();
  }
}

function dispatch(name, value) {
  if (name === "scheduler") {
    gatewayTold(value);
    return drawDevices(value.devices, value.node);
  }
  if (name === "job") return jobTold(value);
  if (name === "lagged") return note("events", `${value.lost} events were lost: this page was too slow`);
  if (name === "trunks") {
    gatewayTold(value);
    return note(value.node ? `trunks of ${value.node}` : "trunks", value.trunks.map(trunk => `${trunk.name} ${trunk.up ? "up" : "down"}`).join(", "));
  }
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

let looks = 0;
async function poll() {
  for (;;) {
    try {
      const ready = await api("GET", "/readyz");
      answering(ready.cluster?.node);
      drawReadiness(ready);
    } catch {
      $("health").textContent = "no answer";
      $("health").className = "pill bad";
    }
    try {
      const calls = (await look("/v1/calls"))?.calls;
      if (calls) drawCalls(calls);
      await figures(calls);
      // Where events come they tell what changes; the list is looked at now and then for jobs that were forgotten.
      if (shown("batch") && !isLocked() && (!events || looks++ % 15 === 0)) await drawJobs(true);
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
