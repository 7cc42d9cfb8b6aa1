// What every panel of the console uses: requests, elements, tabs, the token, the player.

import { CallError } from "/antiphon.js";

export const $ = id => document.getElementById(id);

// ---- the token ----

const KEPT = "antiphon-token";
let token = sessionStorage.getItem(KEPT) ?? "";
let asking = null;
/** Set where the question for a token was dismissed: nothing asks again until somebody opens it. */
let declined = false;
/** Tells `change` when another token counts. */
export const access = new EventTarget();

export const bearer = () => token || undefined;
export const isLocked = () => declined;
const headers = extra => (token ? { ...extra, Authorization: "Bearer " + token } : { ...extra });

/** Asks for a token, once for all who wait; `false` where there is none. */
export function askToken() {
  if (asking) return asking;
  const dialog = $("access");
  $("token").value = "";
  $("token-wrong").hidden = !token;
  $("sign-in").hidden = false;
  dialog.returnValue = "";
  dialog.showModal();
  asking = new Promise(done => {
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "yes" ? $("token").value.trim() : "";
      declined = !given;
      if (given) {
        token = given;
        sessionStorage.setItem(KEPT, token);
        problem(null);
        access.dispatchEvent(new Event("change"));
      }
      done(!!given);
    }, { once: true });
  });
  return asking;
}
$("sign-in").onclick = () => askToken();

// ---- requests ----

/** A response that succeeded, or 503 with what is wrong. Where the gateway wants a token, it is asked for first. */
export async function request(method, path, { body, type, quiet = false, signal } = {}) {
  for (;;) {
    const sent = token;
    const response = await fetch(path, { method, headers: headers(type ? { "Content-Type": type } : {}), body, signal }).catch(() => {
      throw new CallError("the gateway does not answer", { code: "unreachable" });
    });
    if (response.status === 401 && !(quiet && declined)) {
      // Another request has been given one in the meantime, or somebody types it now.
      if (sent !== token || (await askToken())) continue;
    }
    if (response.ok) return response;
    const text = await response.text();
    let error = {};
    try {
      error = JSON.parse(text).error ?? { body: JSON.parse(text) };
    } catch {
      error.message = text.slice(0, 200);
    }
    if (response.status === 503 && error.body) return new Response(text, { status: 200 });
    throw new CallError(response.status === 401 ? "this gateway wants an access token" : (error.message ?? `HTTP ${response.status}`), {
      status: response.status, code: error.code,
    });
  }
}

/** JSON or text of a request. `quiet`: asked by itself again and again, so a refused token is not asked for anew. */
export async function api(method, path, body, quiet = false) {
  const json = body !== undefined && !(body instanceof FormData);
  const response = await request(method, path, { body: json ? JSON.stringify(body) : body, type: json ? "application/json" : undefined, quiet });
  const text = await response.text();
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return text;
  }
}

/** What a stream of server-sent events tells: name and value of each. By `fetch`, since an EventSource can send no token. */
export async function* told(path, signal) {
  const response = await request("GET", path, { quiet: true, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      let data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5).trim();
      }
      if (data) yield [name, JSON.parse(data)];
    }
  }
}

// ---- elements ----

/** An element with properties and children; text is never markup. */
export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value == null) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

export function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A name and its figure. */
export const figure = (name, value) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value ?? "–" }));

/** An address as a table has room for it; the whole of it on pointing. */
export const address = value => (value?.length > 24 ? el("span", { title: value, textContent: value.slice(0, 16) + "…" }) : value);

/** A row of a table whose cells name their column, for narrow windows. */
export function row(cells) {
  return el("tr", {}, ...cells.map(([label, value, number]) => el("td", { "data-label": label, class: number ? "num" : "" }, value instanceof Node ? value : String(value ?? "–"))));
}

export function problem(error) {
  const note = $("problem");
  note.hidden = !error;
  note.textContent = error?.message ?? "";
}

/** Does `work` for an event; what fails is told on the page. */
export const attempt = work => async event => {
  event?.preventDefault?.();
  try {
    problem(null);
    await work(event);
  } catch (error) {
    problem(error);
  }
};

/** Takes the answer to the question that is asked, or was asked last; only the first counts. */
let settle = null;
$("confirm").addEventListener("submit", event => settle?.(event.submitter?.value === "yes"));
// By Escape, or after an answer. It comes some time after the closing: the next question may be open by then.
$("confirm").addEventListener("close", () => {
  if (!$("confirm").open) settle?.(false);
});

export function confirmed(question, yes) {
  settle?.(false);
  $("confirm-text").textContent = question;
  $("confirm-yes").textContent = yes;
  $("confirm").showModal();
  return new Promise(done => (settle = done));
}

// ---- numbers ----

export const ms = value => (value == null ? "–" : Math.round(value) + " ms");
export const seconds = value => {
  const s = Math.round(value);
  return s < 60 ? s + " s" : `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
};
export const bytes = value => (value >= 1e9 ? (value / 1e9).toFixed(1) + " GB" : Math.round(value / 1e6) + " MB");
export const percent = share => (100 * share).toFixed(share && share < 0.1 ? 1 : 0) + " %";

// ---- tabs ----

const tabs = [...$("tabs").querySelectorAll("[role=tab]")];
/** What is loaded when a panel is opened, by the panel's name. */
export const refreshers = {};
export const shown = name => !$("panel-" + name).hidden;

export function show(name, focus) {
  const tab = $("tab-" + name) ?? tabs[0];
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  const chosen = tab.id.slice(4);
  problem(null);
  history.replaceState(null, "", "#" + chosen);
  refreshers[chosen]?.().catch(problem);
}
for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.id.slice(4)));
  tab.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const target = step ? tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length] : { Home: tabs[0], End: tabs.at(-1) }[event.key];
    if (target) {
      event.preventDefault();
      show(target.id.slice(4), true);
    }
  });
}

// ---- what happens ----

const KEPT_EVENTS = 200;
export function note(kind, text) {
  if ($("pause-events").checked) return;
  const log = $("events");
  log.prepend(el("div", { textContent: `${new Date().toLocaleTimeString()}  ${kind}  ${text}` }));
  while (log.childElementCount > KEPT_EVENTS) log.lastChild.remove();
}

// ---- sound ----

/** Plays what a request answers, below the panel that is open. */
export async function play(what, method, path, body) {
  const response = await request(method, path, { body: body && JSON.stringify(body), type: body && "application/json" });
  const player = $("listen");
  if (player.src) URL.revokeObjectURL(player.src);
  player.src = URL.createObjectURL(await response.blob());
  $("player").hidden = false;
  $("playing").textContent = what;
  await player.play();
}
$("close-player").onclick = () => {
  $("listen").pause();
  $("player").hidden = true;
};
