// Antiphon's browser client: puts the page's microphone and speaker on a call with an agent.
//
//   import { connect } from "/antiphon.js";
//   const call = await connect({ agent: "demo" });
//   call.addEventListener("caption", e => console.log(e.detail.who, e.detail.text));
//
// One ES module without dependencies. Signalling is WHIP (RFC 9725) with trickle ICE and ICE restart
// (RFC 8840 fragments); frames travel on the data channel `agent`. Types: antiphon.d.ts.

/** Longest wait for an answer to one request, in milliseconds. */
const REQUEST_TIMEOUT = 15_000;
/** ICE restarts are spaced by these waits, in milliseconds; after the last the call is given up. */
const RESTART_WAITS = [0, 500, 1_000, 2_000, 4_000, 8_000];
/** Time a disconnected transport gets to mend itself before ICE is restarted, in milliseconds. */
const DISCONNECT_GRACE = 1_500;
/** How often levels are reported while somebody listens for them, in milliseconds. */
const LEVEL_PERIOD = 50;

/** A request that the gateway refused, or a device that the browser refused. */
export class CallError extends Error {
  constructor(message, { status = 0, code = "failed", retryAfter = null, cause } = {}) {
    super(message, { cause });
    this.name = "CallError";
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/**
 * Places a call and resolves when it is connected.
 *
 * options: url (gateway, default: where this module came from), token, agent, microphone (true, false,
 * a deviceId, MediaTrackConstraints or a MediaStream), speaker (a deviceId), audio (an <audio> element to
 * play on), echoCancellation, noiseSuppression, autoGainControl (default true), signal (AbortSignal).
 */
export async function connect(options = {}) {
  const call = new Call(options);
  try {
    await call._start();
  } catch (error) {
    call._end("failed");
    throw error instanceof CallError ? error : new CallError(String(error?.message ?? error), { cause: error });
  }
  return call;
}

/** Microphones and speakers; names are empty until the page may use a microphone. */
export async function devices() {
  const all = (await navigator.mediaDevices?.enumerateDevices?.()) ?? [];
  const named = kind => all.filter(d => d.kind === kind).map(d => ({ id: d.deviceId, label: d.label }));
  return { microphones: named("audioinput"), speakers: named("audiooutput") };
}

/**
 * One call. Events (all CustomEvents, data in `detail`):
 * `state` {state}, `frame` (each agent frame), `caption` {who, id, text, heard, final}, `level` {input, output},
 * `blocked` (the browser wants a click before it plays: call `play()` in its handler), `ended` {reason}.
 */
export class Call extends EventTarget {
  constructor(options) {
    super();
    const base = options.url ?? new URL(".", import.meta.url).href;
    this.url = new URL(base, globalThis.location?.href).href.replace(/\/?$/, "/");
    this.agent = options.agent ?? null;
    this.id = null;
    this.state = "idle";
    this.muted = false;
    this._options = options;
    this._captions = new Map();
  }

  // ---- what a page does with a call ----

  /** Has `text` spoken; gives its id. `interrupt` cuts off what is being said. */
  async say(text, { interrupt = false, voice, instructions, seed, language, speed } = {}) {
    const body = { text, interrupt, voice, instructions, seed, language, speed };
    const said = await this._json("POST", `v1/calls/${this.id}/turns`, body);
    return said.utteranceId;
  }

  /** Silences what is being said and drops what waits. */
  async interrupt() {
    await this._json("POST", `v1/calls/${this.id}/interrupt`);
  }

  /** Sends one frame of the agent protocol on the data channel (agents `demo` and `client`). */
  send(frame) {
    if (this._channel?.readyState !== "open") throw new CallError("the data channel is not open", { code: "no_channel" });
    this._channel.send(typeof frame === "string" ? frame : JSON.stringify(frame));
  }

  /** Presses telephone keys, `0`-`9`, `*`, `#`, `A`-`D` (RFC 4733 events beside the microphone's sound). */
  async digits(digits) {
    if (!this._sender?.dtmf?.canInsertDTMF) {
      throw new CallError("keys travel with the microphone's sound: call with a microphone", { code: "no_microphone" });
    }
    this._sender.dtmf.insertDTMF(digits, 100, 70);
  }

  /** Silences the microphone without giving it up. */
  mute(muted = true) {
    this.muted = muted;
    for (const track of this._microphone?.getAudioTracks() ?? []) track.enabled = !muted;
    this._tell("state", { state: this.state, muted });
  }

  /** Changes the microphone in mid-call. */
  async setMicrophone(choice) {
    const stream = await this._openMicrophone(choice);
    await this._sender?.replaceTrack(stream?.getAudioTracks()[0] ?? null);
    this._closeMicrophone();
    this._microphone = stream;
    this.mute(this.muted);
    this._meter("input", stream);
  }

  /** Changes the speaker, where the browser can (not in Firefox before 116 or Safari). */
  async setSpeaker(id) {
    if (!this._audio?.setSinkId) throw new CallError("this browser has one speaker", { code: "unsupported" });
    await this._audio.setSinkId(id);
  }

  /** Starts playing after `blocked`; call it in a click handler. */
  async play() {
    await this._context?.resume?.();
    await this._audio?.play();
  }

  /** Round trip, jitter and loss of the transport, from the browser's own statistics. */
  async stats() {
    const found = { roundTripMs: null, jitterMs: null, lost: 0, received: 0, concealedMs: 0, bufferMs: null };
    for (const report of (await this._peer?.getStats())?.values() ?? []) {
      if (report.type === "candidate-pair" && report.nominated && report.currentRoundTripTime != null) {
        found.roundTripMs = report.currentRoundTripTime * 1e3;
      }
      if (report.type === "inbound-rtp" && report.kind === "audio") {
        found.jitterMs = (report.jitter ?? 0) * 1e3;
        found.lost = report.packetsLost ?? 0;
        found.received = report.packetsReceived ?? 0;
        found.concealedMs = ((report.concealedSamples ?? 0) - (report.silentConcealedSamples ?? 0)) / 48;
        if (report.jitterBufferEmittedCount) {
          found.bufferMs = (report.jitterBufferDelay / report.jitterBufferEmittedCount) * 1e3;
        }
      }
    }
    return found;
  }

  /** Ends the call. */
  async hangUp() {
    this._end("hungUp");
  }

  // ---- set-up ----

  async _start() {
    this._set("connecting");
    this._options.signal?.addEventListener("abort", () => this._end("hungUp"), { once: true });
    const wanted = this._options.microphone ?? true;
    // Relay candidates can only stand in the offer if the servers are known before it.
    const asked = this._options.iceServers ??
      this._request("GET", "v1/webrtc").then(r => r.json()).then(r => r.iceServers).catch(() => []); // the answer names them too
    this._microphone = wanted === false ? null : await this._openMicrophone(wanted);
    const servers = await asked;

    const peer = (this._peer = new RTCPeerConnection({ bundlePolicy: "max-bundle", iceServers: servers }));
    peer.ontrack = event => this._hear(event.streams[0] ?? new MediaStream([event.track]));
    peer.onicecandidate = event => this._trickle(event.candidate);
    peer.onconnectionstatechange = () => this._transport();
    peer.oniceconnectionstatechange = () => this._transport();
    this._channel = peer.createDataChannel("agent");
    this._channel.onmessage = event => this._frame(event.data);
    const track = this._microphone?.getAudioTracks()[0];
    const transceiver = peer.addTransceiver(track ?? "audio", {
      direction: track ? "sendrecv" : "recvonly",
      streams: this._microphone ? [this._microphone] : [],
    });
    this._sender = transceiver.sender;
    this._meter("input", this._microphone);

    await peer.setLocalDescription();
    const query = this.agent == null ? "" : "?agent=" + encodeURIComponent(this.agent);
    const response = await this._request("POST", "v1/webrtc" + query, peer.localDescription.sdp, "application/sdp");
    this._resource = new URL(response.headers.get("Location"), this.url).href;
    this._etag = response.headers.get("ETag");
    this.id = response.headers.get("X-Antiphon-Call");
    if (this.state === "ended") return this._end("hungUp"); // hung up while it rang
    const linked = iceServers(response.headers.get("Link"));
    if (linked.length && !servers.length) peer.setConfiguration({ ...peer.getConfiguration(), iceServers: linked });
    await peer.setRemoteDescription({ type: "answer", sdp: await response.text() });
    this._flush();
    await new Promise((connected, failed) => {
      this._connected = connected;
      this._failed = failed;
      this._transport();
    });
  }

  async _openMicrophone(choice) {
    if (choice instanceof MediaStream) return choice;
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new CallError("the browser gives a microphone to pages on HTTPS or localhost only", { code: "insecure_page" });
    }
    const { echoCancellation = true, noiseSuppression = true, autoGainControl = true } = this._options;
    const audio = { echoCancellation, noiseSuppression, autoGainControl, channelCount: 1 };
    if (typeof choice === "string") audio.deviceId = { exact: choice };
    else if (choice !== true) Object.assign(audio, choice);
    try {
      return await navigator.mediaDevices.getUserMedia({ audio });
    } catch (cause) {
      const why = { NotAllowedError: "was refused", NotFoundError: "is not there", NotReadableError: "is in use by another program" };
      throw new CallError("the microphone " + (why[cause.name] ?? "failed: " + cause.message), { code: "microphone", cause });
    }
  }

  // ---- transport ----

  _transport() {
    const { _peer: peer } = this;
    if (!peer || this.state === "ended") return;
    // Firefox has had no `connectionState` before 113; ICE's state says as much for one bundled transport.
    const state = peer.connectionState ?? peer.iceConnectionState;
    if (state === "connected" || state === "completed") {
      clearTimeout(this._restartTimer);
      this._restartTimer = null;
      this._restarts = 0;
      this._set("connected");
      this._connected?.();
    } else if (state === "failed") {
      this._restart(0);
    } else if (state === "disconnected") {
      this._set("reconnecting");
      this._restart(DISCONNECT_GRACE);
    }
  }

  /** Restarts ICE: same call, same keys, another network path. */
  _restart(wait) {
    if (this._restartTimer) return;
    this._restartTimer = setTimeout(async () => {
      this._restartTimer = null;
      const peer = this._peer;
      if (!peer || this.state === "ended") return;
      const attempt = this._restarts ?? 0;
      if (!this._resource || attempt >= RESTART_WAITS.length) {
        this._failed?.(new CallError("no path to the gateway: UDP is blocked and no TURN server helps", { code: "no_path" }));
        return this._end("lost");
      }
      this._restarts = attempt + 1;
      this._set("reconnecting");
      try {
        this._pending = null; // candidates of the new generation go with the fragment below
        await peer.setLocalDescription(await peer.createOffer({ iceRestart: true }));
        await gathered(peer, 1_000);
        const fragment = fragmentOf(peer.localDescription.sdp);
        const response = await this._request("PATCH", this._resource, fragment, "application/trickle-ice-sdpfrag", { "If-Match": "*" });
        this._etag = response.headers.get("ETag") ?? this._etag;
        if (response.status !== 204) {
          const sdp = withFragment(peer.currentRemoteDescription.sdp, await response.text());
          await peer.setRemoteDescription({ type: "answer", sdp });
        }
      } catch (error) {
        if (error.status === 404 || error.status === 409) return this._end("lost"); // the gateway has ended the call
      }
      if (this.state === "reconnecting") this._restart(RESTART_WAITS[Math.min(attempt + 1, RESTART_WAITS.length - 1)]);
    }, wait);
  }

  _trickle(candidate) {
    if (!candidate || !candidate.candidate || this._restarts) return;
    (this._pending ??= []).push("a=" + candidate.candidate);
    if (this._resource) this._flush();
  }

  _flush() {
    if (!this._pending?.length || this._sending) return;
    const description = this._peer?.localDescription?.sdp ?? "";
    const head = /^a=ice-(?:ufrag|pwd):.*$/gm;
    const body = [...new Set(description.match(head) ?? []), "m=audio 9 UDP/TLS/RTP/SAVPF 0", "a=mid:0", ...this._pending, ""].join("\r\n");
    this._pending = null;
    this._sending = this._request("PATCH", this._resource, body, "application/trickle-ice-sdpfrag", { "If-Match": this._etag ?? "*" })
      .catch(() => {}) // a path that is not told is a path less; the others are tried
      .finally(() => {
        this._sending = null;
        this._flush();
      });
  }

  // ---- sound ----

  _hear(stream) {
    this._audio = this._options.audio ?? Object.assign(document.createElement("audio"), { autoplay: true });
    // Safari plays nothing that is not inline.
    this._audio.playsInline = true;
    this._audio.srcObject = stream;
    if (this._options.speaker && this._audio.setSinkId) this._audio.setSinkId(this._options.speaker).catch(() => {});
    this._audio.play().catch(error => error.name === "NotAllowedError" && this._tell("blocked", {}));
    this.remoteStream = stream;
    this._meter("output", stream);
  }

  /** Level of a stream in dBFS, by an analyser that is read only while somebody listens for `level`. */
  _meter(side, stream) {
    this._analysers ??= {};
    this._analysers[side]?.source.disconnect();
    delete this._analysers[side];
    const Context = globalThis.AudioContext ?? globalThis.webkitAudioContext;
    if (!stream?.getAudioTracks().length || !Context) return;
    try {
      this._context ??= new Context();
      const source = this._context.createMediaStreamSource(stream);
      const analyser = this._context.createAnalyser();
      analyser.fftSize = 1024;
      source.connect(analyser);
      this._analysers[side] = { source, analyser, block: new Float32Array(analyser.fftSize) };
    } catch {
      // A browser without Web Audio still has the call.
    }
    this._levels ??= setInterval(() => this._tell("level", this.levels()), LEVEL_PERIOD);
  }

  /** Levels of microphone and speaker in dBFS; -100 is silence. */
  levels() {
    const level = side => {
      const meter = this._analysers?.[side];
      if (!meter || (side === "input" && this.muted)) return -100;
      meter.analyser.getFloatTimeDomainData(meter.block);
      let power = 0;
      for (const sample of meter.block) power += sample * sample;
      return Math.max(-100, 10 * Math.log10(power / meter.block.length + 1e-10));
    };
    return { input: level("input"), output: level("output") };
  }

  // ---- frames ----

  _frame(data) {
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {
      return; // not ours
    }
    this._tell("frame", frame);
    const caption = captionOf(frame);
    if (caption) {
      const before = this._captions.get(caption.id);
      if (before) caption.text ??= before.text;
      this._captions.set(caption.id, caption);
      if (caption.final) this._captions.delete(caption.id);
      this._tell("caption", caption);
    }
  }

  // ---- plumbing ----

  _tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  _set(state) {
    if (this.state === state || this.state === "ended") return;
    this.state = state;
    this._tell("state", { state, muted: this.muted });
  }

  _closeMicrophone() {
    // A stream that the page brought is the page's to stop.
    if (this._options.microphone instanceof MediaStream && this._microphone === this._options.microphone) return;
    for (const track of this._microphone?.getTracks() ?? []) track.stop();
  }

  _end(reason) {
    const first = this.state !== "ended";
    this.state = "ended";
    clearTimeout(this._restartTimer);
    clearInterval(this._levels);
    if (this._resource) {
      // `keepalive`: also while the page goes away.
      fetch(this._resource, { method: "DELETE", headers: this._headers(), keepalive: true }).catch(() => {});
      this._resource = null;
    }
    this._peer?.close();
    this._closeMicrophone();
    this._context?.close?.().catch?.(() => {});
    this._peer = this._context = this._microphone = null;
    if (first) {
      this._failed?.(new CallError("the call ended before it was connected: " + reason, { code: reason }));
      this._tell("state", { state: "ended", muted: this.muted });
      this._tell("ended", { reason });
    }
  }

  _headers(type, extra = {}) {
    const headers = { ...extra };
    if (type) headers["Content-Type"] = type;
    if (this._options.token) headers.Authorization = "Bearer " + this._options.token;
    return headers;
  }

  async _request(method, path, body, type, extra) {
    const abort = new AbortController();
    const timer = setTimeout(() => abort.abort(), REQUEST_TIMEOUT);
    try {
      const response = await fetch(new URL(path, this.url), { method, body, headers: this._headers(type, extra), signal: abort.signal });
      if (!response.ok) throw await refusal(response);
      return response;
    } catch (cause) {
      if (cause instanceof CallError) throw cause;
      const why = abort.signal.aborted ? "does not answer" : "cannot be reached";
      throw new CallError(`the gateway at ${this.url} ${why}`, { code: "unreachable", cause });
    } finally {
      clearTimeout(timer);
    }
  }

  async _json(method, path, body) {
    const response = await this._request(method, path, body === undefined ? undefined : JSON.stringify(body), body === undefined ? undefined : "application/json");
    const text = await response.text();
    return text ? JSON.parse(text) : {};
  }
}

/** The gateway's error as a CallError. */
async function refusal(response) {
  const text = await response.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    error.message = text.slice(0, 200);
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After"));
  return new CallError(error.message || `HTTP ${response.status}`, {
    status: response.status,
    code: error.code ?? "refused",
    retryAfter: Number.isFinite(wait) ? wait : null,
  });
}

/** What a frame means for captions, if anything. `heard` is the text that left for the listener. */
function captionOf(frame) {
  switch (frame.type) {
    case "prompt":
      return { who: "caller", id: "caller", text: frame.voicePrompt, heard: frame.voicePrompt, final: frame.last === true };
    case "interrupt":
      return { who: "agent", id: frame.utteranceId, heard: frame.utteranceUntilInterrupt, cut: true, final: false };
    case "info":
      if (frame.name === "turnStarted") return { who: "agent", id: frame.utteranceId, text: frame.text, heard: "", final: false };
      if (frame.name === "turnEnded") {
        return { who: "agent", id: frame.utteranceId, heard: frame.heard?.text ?? "", how: frame.how, final: true };
      }
  }
  return null;
}

/** ICE servers of `Link` headers (RFC 9725 section 4.6). */
function iceServers(link) {
  const servers = [];
  for (const part of link?.match(/<[^>]+>(?:\s*;\s*[\w-]+="(?:[^"\\]|\\.)*"|\s*;\s*[\w-]+=[^",;]+)*/g) ?? []) {
    const urls = part.slice(1, part.indexOf(">"));
    const field = name => part.match(new RegExp(`;\\s*${name}="((?:[^"\\\\]|\\\\.)*)"`))?.[1]?.replace(/\\(.)/g, "$1");
    if (/rel="?ice-server"?/.test(part)) servers.push({ urls, username: field("username"), credential: field("credential") });
  }
  return servers.map(server => (server.username ? server : { urls: server.urls }));
}

/** Resolves when candidates are complete, or after `limit` milliseconds. */
function gathered(peer, limit) {
  return new Promise(done => {
    if (peer.iceGatheringState === "complete") return done();
    const timer = setTimeout(done, limit);
    peer.addEventListener("icegatheringstatechange", () => {
      if (peer.iceGatheringState === "complete") {
        clearTimeout(timer);
        done();
      }
    });
  });
}

/** The ICE part of a description, as a trickle fragment (RFC 8840). */
function fragmentOf(sdp) {
  const lines = sdp.split(/\r?\n/);
  const one = name => lines.find(line => line.startsWith("a=" + name + ":"));
  const candidates = [...new Set(lines.filter(line => line.startsWith("a=candidate:")))];
  return [one("ice-ufrag"), one("ice-pwd"), "m=audio 9 UDP/TLS/RTP/SAVPF 0", one("mid") ?? "a=mid:0", ...candidates, "a=end-of-candidates", ""].join("\r\n");
}

/** `sdp` with the ICE credentials and candidates of `fragment` in place of its own. */
function withFragment(sdp, fragment) {
  const from = fragment.split(/\r?\n/);
  const one = name => from.find(line => line.startsWith("a=" + name + ":"));
  const candidates = from.filter(line => line.startsWith("a=candidate:"));
  let first = true;
  const lines = [];
  for (const line of sdp.split(/\r?\n/)) {
    if (line.startsWith("a=candidate:") || line === "a=end-of-candidates") continue;
    if (line.startsWith("a=ice-ufrag:")) lines.push(one("ice-ufrag"));
    else if (line.startsWith("a=ice-pwd:")) {
      lines.push(one("ice-pwd"));
      if (first) lines.push(...candidates);
      first = false;
    } else lines.push(line);
  }
  return lines.join("\r\n");
}
