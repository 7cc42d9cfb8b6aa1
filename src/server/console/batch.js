// Batch jobs: submit, follow, listen to.

import { $, api, attempt, el, play, refreshers, seconds } from "/console/base.js";
import { drawVoices } from "/console/voices.js";

const OVER = ["done", "failed", "cancelled"];
const open = new Set();

export async function drawJobs(quiet) {
  const page = await api("GET", "/v1/jobs?limit=50", undefined, quiet);
  const jobs = page.jobs ?? [];
  $("no-jobs").hidden = jobs.length > 0;
  // Drawn anew, so that the keyboard stays where it is only while nothing in there has it.
  if (quiet && $("jobs").contains(document.activeElement)) return;
  $("jobs").replaceChildren(...jobs.map(job));
}

function job(job) {
  const over = OVER.includes(job.state);
  const name = job.id.slice(0, 8);
  const left = job.state === "running" && job.etaSeconds != null ? `, ${seconds(job.etaSeconds)} left` : "";
  const box = el("div", { class: "job" },
    el("div", {}, el("span", { textContent: `${name} · ${job.state} · ${job.finished} of ${job.total}${left}` }),
      job.reason ? el("div", { class: "hint", textContent: job.reason }) : null,
      over ? null : el("progress", { max: job.total, value: job.finished, "aria-label": `progress of ${name}` })),
    job.state === "done" ? el("button", { class: "small", textContent: "Listen", "aria-label": `Listen to ${name}`, onclick: attempt(() => play(`job ${name}`, "GET", `/v1/jobs/${job.id}/audio`)) }) : null,
    over ? null : el("button", { class: "small", textContent: "Cancel", "aria-label": `Cancel ${name}`, onclick: attempt(async () => { await api("DELETE", `/v1/jobs/${job.id}`); await drawJobs(); }) }),
    el("button", { class: "small", textContent: open.has(job.id) ? "Hide items" : "Items", "aria-label": `Items of ${name}`, "aria-expanded": open.has(job.id), onclick: attempt(async () => {
      if (!open.delete(job.id)) open.add(job.id);
      await drawJobs();
    }) }));
  if (open.has(job.id)) {
    const list = el("ol", { class: "items" });
    box.append(list);
    api("GET", `/v1/jobs/${job.id}`).then(full => list.append(...(full.results ?? []).map(item => el("li", {},
      `${item.status}${item.durationMs ? ", " + (item.durationMs / 1e3).toFixed(1) + " s" : ""}${item.error ? ": " + item.error : ""} `,
      item.status === "done" ? el("button", { class: "small", textContent: "Listen", "aria-label": `Listen to item ${item.index + 1} of ${name}`, onclick: attempt(() => play(`job ${name}, item ${item.index + 1}`, "GET", `/v1/jobs/${job.id}/audio?item=${item.index}`)) }) : null)))).catch(() => {});
  }
  return box;
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
