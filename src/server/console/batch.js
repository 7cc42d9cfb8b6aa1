// Batch jobs: submit, follow, listen to.

import { $, api, attempt, el, play, refreshers, seconds, shown, told } from "/console/base.js";
import { drawVoices } from "/console/voices.js";

const OVER = ["done", "failed", "cancelled"];
const RETRY = 2_000;
/** The jobs that are drawn: what was told of each, and its box. */
const drawn = new Map();
/** The lists of items that are open, and what ends following them. */
const open = new Map();

export async function drawJobs(quiet) {
  const page = await api("GET", "/v1/jobs?limit=50", undefined, quiet);
  const jobs = page.jobs ?? [];
  $("no-jobs").hidden = jobs.length > 0;
  // Drawn anew, so that the keyboard stays where it is only while nothing in there has it.
  if (quiet && $("jobs").contains(document.activeElement)) return;
  drawn.clear();
  for (const one of jobs) drawn.set(one.id, { job: one, box: box(one) });
  $("jobs").replaceChildren(...[...drawn.values()].map(one => one.box));
  for (const id of open.keys()) if (!drawn.has(id)) close(id);
}

/** A job has changed, by /v1/events or by its own stream. */
export function jobTold(job) {
  const known = drawn.get(job.id);
  if (!known) return shown("batch") ? drawJobs(true).catch(() => {}) : undefined;
  // Two streams may tell of it; the one that is behind changes nothing.
  if (OVER.includes(known.job.state) || job.finished < known.job.finished) return;
  const ended = OVER.includes(job.state);
  known.job = job;
  if (!ended) {
    known.box.querySelector(".state").textContent = state(job);
    const reason = known.box.querySelector(".reason");
    reason.textContent = job.reason ?? "";
    reason.hidden = !job.reason;
    known.box.querySelector("progress").value = job.finished;
    return;
  }
  const held = known.box.contains(document.activeElement);
  const next = box(job);
  known.box.replaceWith(next);
  known.box = next;
  // What had the keyboard may be gone: the button that every job has gets it.
  if (held) next.querySelector("button[aria-expanded]").focus();
}

const name = job => job.id.slice(0, 8);

function state(job) {
  const left = job.state === "running" && job.etaSeconds != null ? `, ${seconds(job.etaSeconds)} left` : "";
  return `${name(job)} · ${job.state} · ${job.finished} of ${job.total}${left}`;
}

function box(job) {
  const over = OVER.includes(job.state);
  const items = el("button", { class: "small", textContent: open.has(job.id) ? "Hide items" : "Items", "aria-label": `Items of ${name(job)}`, "aria-expanded": open.has(job.id), onclick: () => {
    if (open.has(job.id)) close(job.id);
    else whole.append(follow(job));
    items.textContent = open.has(job.id) ? "Hide items" : "Items";
    items.ariaExpanded = open.has(job.id);
  } });
  const whole = el("div", { class: "job" },
    el("div", {}, el("span", { class: "state", textContent: state(job) }),
      el("div", { class: "hint reason", textContent: job.reason ?? "", hidden: !job.reason }),
      over ? null : el("progress", { max: job.total, value: job.finished, "aria-label": `progress of ${name(job)}` })),
    job.state === "done" ? el("button", { class: "small", textContent: "Listen", "aria-label": `Listen to ${name(job)}`, onclick: attempt(() => play(`job ${name(job)}`, "GET", `/v1/jobs/${job.id}/audio`)) }) : null,
    over ? null : el("button", { class: "small", textContent: "Cancel", "aria-label": `Cancel ${name(job)}`, onclick: attempt(async () => { await api("DELETE", `/v1/jobs/${job.id}`); await drawJobs(); }) }),
    items);
  if (open.has(job.id)) whole.append(open.get(job.id).list);
  return whole;
}

function close(id) {
  open.get(id).leave.abort();
  open.get(id).list.remove();
  open.delete(id);
}

/** A list of a job's items that follows them until it is closed or the job is over. */
function follow(job) {
  const list = el("ol", { class: "items" });
  const leave = new AbortController();
  const rows = new Map();
  const draw = item => {
    const row = el("li", {}, `${item.status}${item.durationMs ? ", " + (item.durationMs / 1e3).toFixed(1) + " s" : ""}${item.error ? ": " + item.error : ""} `,
      item.status === "done" ? el("button", { class: "small", textContent: "Listen", "aria-label": `Listen to item ${item.index + 1} of ${name(job)}`, onclick: attempt(() => play(`job ${name(job)}, item ${item.index + 1}`, "GET", `/v1/jobs/${job.id}/audio?item=${item.index}`)) }) : null);
    const before = rows.get(item.index);
    if (before) before.replaceWith(row);
    else list.append(row);
    rows.set(item.index, row);
  };
  const stay = async () => {
    while (!leave.signal.aborted) {
      try {
        for await (const [kind, value] of told(`/v1/jobs/${job.id}/events`, leave.signal)) {
          for (const item of kind === "item" ? [value] : (value.results ?? [])) draw(item);
          if (kind !== "job") continue;
          jobTold(value);
          if (OVER.includes(value.state)) return;
        }
      } catch {
        // It is over by then, or can be reached again.
      }
      await new Promise(done => setTimeout(done, RETRY));
    }
  };
  open.set(job.id, { list, leave });
  stay();
  return list;
}

$("job").onsubmit = attempt(async () => {
  const items = $("job-text").value.split("\n").map(line => line.trim()).filter(Boolean);
  await api("POST", "/v1/audio/speech/batch", { items, voice: $("job-voice").value || undefined, response_format: $("job-format").value });
  $("job-text").value = "";
  await drawJobs();
});
refreshers.batch = async () => {
  await Promise.all([drawJobs(), drawVoices()]);
};
