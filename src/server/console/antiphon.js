// Antiphon's browser client: puts the page's microphone and speaker on a call with an agent.
//
//   import { connect } from "/antiphon.js";
//   const call = await connect({ agent: "demo" });
//   call.addEventListener("caption", e => console.log(e.detail.who, e.detail.text));
//
// One ES module without dependencies. Signalling is WHIP (RFC 9725) with trickle ICE and ICE restart
// (RFC 8840 fragments); frames travel on the data channel `agent`. Types: antiphon.d.ts.
//
// Why this file is long: pages of others load it as one file, with one request and no build step.

/** Longest wait for an answer to one request, in milliseconds. */
const REQUEST_TIMEOUT = 15_000;
/** ICE restarts are spaced by these waits, in milliseconds; after the last the call is given up. */
const RESTART_WAITS = [0, 500, 1_000, 2_000, 4_000, 8_000];
/** Time a disconnected transport gets to mend itself before ICE is restarted, in milliseconds. */
const DISCONNECT_GRACE = 1_500;
/** Longest wait for the answer to an ICE restart, in milliseconds: the connection it went by may be gone too. */
const RESTART_TIMEOUT = 3_000;
/** When to ask meanwhile, over another connection each time, in milliseconds: browsers have six to one server. */
const RESTART_ASKS = [0, 150, 400, 800, 1_400];
/** Sound that is due and does not come for so long, in milliseconds, means that the path is gone. */
const STALLED = 400;
/** How often that is looked at. */
const STALL_PERIOD = 100;
/**
 * How long a restart that brought no sound is left alone: as long at first, twice as long each time, at most so long, for an
 * agent may pause. One that began before the browser saw its new network is not waited for: see `networks`.
 */
const STALL_PATIENCE = 1_000;
const STALL_SPACING = 5_000;
/** Longest wait for the browser's list of its own addresses, in milliseconds. */
const LISTING = 400;
/** Longest wait for another connection in place of one whose network is gone, in milliseconds, and between two looks for it. */
const GOING_OVER = 4_000;
const LOOKING = 150;
/** New sessions in place of lost ones, until one has lasted `SETTLED` milliseconds. */
const RENEWALS = 3;
const SETTLED = 30_000;
/** How often captions follow the sound, in milliseconds. */
const CAPTION_PERIOD = 80;
/** From a packet's departure to the ear, in milliseconds, until the browser's statistics say. */
const USUAL_DELAY = 120;

/** Events after which a browser lets sound begin. */
const GESTURES = ["click", "keydown"];
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
 * play on), iceServers (default: what the gateway names), echoCancellation, noiseSuppression, autoGainControl (default true),
 * reconnect (default true: a lost session is replaced by a new one, with a new agent), signal (AbortSignal).
 */
export async function connect(options = {}) {
  const call = new Call(options);
  call._unlock(); // while the browser still counts this as the user's click
  try {
    await call._start();
  } catch (error) {
    call._end("failed");
    throw error instanceof CallError ? error : new CallError(String(error?.message ?? error), { cause: error });
  }
  // The browser says so before the call stands, when no page can listen yet: told again behind the page's next lines.
  setTimeout(() => call.blocked && call._tell("blocked", {}));
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
 * `blocked` (the browser wants a click before it plays: call `play()` in its handler; `call.blocked` says so, too), `moved`
 * (the call goes on by another connection, as the browser has another network: nothing to do), `renewed` {id, before} (the
 * old session was lost; this is another, whose agent knows nothing of it), `ended` {reason}: `hungUp`, `remote`, `lost`,
 * `failed`.
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
    this.blocked = false;
    this._options = { ...options };
    this._captions = new Captions(caption => this._tell("caption", caption));
    this._renewals = 0;
    this._leave = () => this.hangUp();
    this._network = globalThis.navigator?.connection?.type;
    // Another network: the old path is gone, whether the browser has seen it yet or not.
    this._moved = () => {
      const network = globalThis.navigator?.connection?.type; // where the browser tells; its estimates change all the time
      const changed = network !== this._network;
      this._network = network;
      if (changed && network !== "none") this._hasten();
    };
    this._online = () => this._hasten();
    // Of a call that a script began without a click the sound may play, but meters stand still until there is one.
    this._touched = () => this._context?.state === "suspended" && this._context.resume().catch(() => {});
  }

  // ---- what a page does with a call ----

  /** Has `text` spoken; gives its id. `interrupt` cuts off what is being said. */
  async say(text, { interrupt = false, voice, instructions, seed, language, speed } = {}) {
    const body = { text, interrupt, voice, instructions, seed, language, speed };
    const said = await this._json("POST", `v1/calls/${this.id}/turns`, body);
    this._captions.planned(said.utteranceId, text);
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
    if (!this._sender?.track || !this._sender.dtmf?.canInsertDTMF) {
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

  /** Changes the microphone in mid-call; `false` gives it up, and one may follow where there was none. */
  async setMicrophone(choice) {
    const stream = choice === false ? null : await this._openMicrophone(choice);
    const track = stream?.getAudioTracks()[0] ?? null;
    if (track) track.enabled = !this.muted; // before anything of it is sent
    try {
      if (this.state === "ended") throw new CallError("the call is over", { code: "ended" });
      await this._sender?.replaceTrack(track);
    } catch (error) {
      if (stream !== choice) for (const one of stream?.getTracks() ?? []) one.stop();
      throw error;
    }
    this._closeMicrophone();
    this._useMicrophone(stream, choice);
    if (this.state === "ended") this._closeMicrophone(); // meanwhile
  }

  /** Changes the speaker, where the browser can (not in Firefox before 116 or Safari). */
  async setSpeaker(id) {
    if (!this._audio?.setSinkId) throw new CallError("this browser has one speaker", { code: "unsupported" });
    try {
      await this._audio.setSinkId(id);
    } catch (cause) {
      const why = { NotAllowedError: "was refused", NotFoundError: "is not there" }[cause.name] ?? "failed: " + cause.message;
      throw new CallError("the speaker " + why, { code: "speaker", cause });
    }
    this._options.speaker = id;
  }

  /** Starts playing after `blocked`; call it in a click handler. */
  async play() {
    // Not waited for: without a sound card a browser may never resume it, and it is of the meters only.
    this._context?.resume?.().catch?.(() => {});
    await this._audio?.play();
    this.blocked = false;
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
          // The way, the buffer, and some 20 ms of the sound card.
          this._captions.delay = (found.roundTripMs ?? 0) / 2 + found.bufferMs + 20;
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
    const { signal } = this._options;
    signal?.addEventListener("abort", () => this._end("hungUp"), { once: true });
    if (signal?.aborted) this._end("hungUp");
    this._unlessOver();
    const wanted = this._options.microphone ?? true;
    // Relay candidates can only stand in the offer if the servers are known before it.
    const asked = this._options.iceServers ??
      this._request("GET", "v1/webrtc").then(r => r.json()).then(r => r.iceServers).catch(() => []); // the answer names them too
    this._useMicrophone(wanted === false ? null : await this._openMicrophone(wanted), wanted);
    this._servers = await asked;
    this._unlessOver();
    globalThis.addEventListener?.("pagehide", this._leave);
    globalThis.addEventListener?.("online", this._online);
    for (const kind of GESTURES) globalThis.addEventListener?.(kind, this._touched);
    globalThis.navigator?.connection?.addEventListener?.("change", this._moved);
    this._watching = setInterval(() => this._watch().catch(() => {}), STALL_PERIOD);
    await this._open();
  }

  /** Leaves the setting up of a call that was hung up meanwhile. */
  _unlessOver() {
    if (this.state === "ended") throw new CallError("the call was hung up before it was connected", { code: "hungUp" });
  }

  /** A connection that knows the networks that the window `home` knows. Its events count while it is the call's. */
  _build(home) {
    const peer = new home.RTCPeerConnection({ bundlePolicy: "max-bundle", iceServers: this._servers });
    const made = { home, peer, stream: null };
    peer.ontrack = event => {
      made.stream = event.streams[0] ?? new MediaStream([event.track]);
      if (peer === this._peer) this._hear(made.stream);
    };
    peer.onicecandidate = event => peer === this._peer && this._trickle(event.candidate);
    peer.onconnectionstatechange = () => peer === this._peer && this._transport();
    peer.oniceconnectionstatechange = () => peer === this._peer && this._transport();
    made.channel = peer.createDataChannel("agent");
    made.channel.onmessage = event => this._frame(event.data);
    // The gateway closes it when the call ends there; what breaks off does not.
    made.channel.onclose = () => peer === this._peer && this.state === "connected" && this._end("remote");
    const track = this._microphone?.getAudioTracks()[0];
    // Without a microphone nothing is sent, but one may follow.
    const transceiver = peer.addTransceiver(track ?? "audio", {
      direction: "sendrecv",
      streams: this._microphone ? [this._microphone] : [],
    });
    made.sender = transceiver.sender;
    return made;
  }

  /** Makes a connection the call's. */
  _use({ home, peer, channel, sender }) {
    Object.assign(this, { _home: home, _peer: peer, _channel: channel, _sender: sender, _restarts: 0 });
  }

  /** Begins a session: the first one, or another in place of a lost one. */
  async _open() {
    const servers = this._servers;
    const made = this._build(globalThis);
    const { peer } = made;
    this._use(made);
    this._pending = this._sending = null;

    await peer.setLocalDescription();
    const query = this.agent == null ? "" : "?agent=" + encodeURIComponent(this.agent);
    const response = await this._request("POST", "v1/webrtc" + query, peer.localDescription.sdp, "application/sdp");
    this._resource = new URL(response.headers.get("Location"), this.url).href;
    this._etag = response.headers.get("ETag");
    this.id = response.headers.get("X-Antiphon-Call");
    if (this.state === "ended") this._end("hungUp"); // hung up while it rang: now there is something to give back
    this._unlessOver();
    const linked = iceServers(response.headers.get("Link"));
    if (linked.length && !servers.length) peer.setConfiguration({ ...peer.getConfiguration(), iceServers: linked });
    await peer.setRemoteDescription({ type: "answer", sdp: ranked(await response.text(), (this._generation = 0)) });
    this._flush();
    await new Promise((connected, failed) => {
      this._connected = connected;
      this._failed = failed;
      this._transport();
    });
  }

  /** What is left when the old session cannot be had back: another one. */
  async _renew(reason) {
    if (this._renewing || this.state === "ended") return;
    // A page's single-use token has begun its call; another call needs another token.
    const single = this._options.token?.startsWith("antiphon-page-");
    if (this._options.reconnect === false || single || !this._settled) return this._end(reason);
    const before = this.id;
    this._renewing = true;
    while (this._renewals < RENEWALS && this.state !== "ended") {
      this._renewals += 1;
      this._release();
      this._captions.clear();
      this._set("reconnecting");
      try {
        await this._open();
        this._renewing = false;
        if (this.state !== "ended") this._tell("renewed", { id: this.id, before });
        return;
      } catch {
        await new Promise(done => setTimeout(done, 1_000 * this._renewals));
      }
    }
    this._end(reason);
  }

  /** Gives the session and its connection back; microphone and speaker stay. */
  _release() {
    clearTimeout(this._restartTimer);
    clearTimeout(this._settling);
    this._restartTimer = this._settling = null;
    const { _peer: peer, _window: frame } = this;
    this._peer = this._window = null;
    const close = () => {
      peer?.close();
      frame?.remove();
    };
    if (this._resource) {
      // `keepalive`: also while the page goes away. The connection is closed behind it: a gateway that sees that first
      // has no session left to delete.
      fetch(this._resource, { method: "DELETE", headers: this._headers(), keepalive: true }).catch(() => {}).finally(close);
      setTimeout(close, 1_000);
      this._resource = null;
    } else close();
    if (this._audio) this._audio.srcObject = null;
  }

  /** `choice`: what the page asked for; a stream that it brought is the page's to stop. */
  _useMicrophone(stream, choice) {
    this._microphone = stream;
    this._brought = stream !== null && stream === choice;
    const track = stream?.getAudioTracks()[0];
    // Pulled out: the default one takes over. `stop()` of our own tells no such event.
    track?.addEventListener("ended", () => {
      if (this._microphone === stream && this.state !== "ended") this.setMicrophone(true).catch(() => {});
    });
    this._meter("input", stream);
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
      this._down = false;
      // Only a session that has stood is worth replacing, and one that stands for long clears the count.
      this._settled = true;
      this._settling ??= setTimeout(() => (this._renewals = 0), SETTLED);
      this._set("connected");
      this._connected?.();
    } else if (state === "failed") {
      this._restart(0);
    } else if (state === "disconnected") {
      this._set("reconnecting");
      this._lookAround();
      this._restart(DISCONNECT_GRACE);
    }
  }

  /**
   * Watches that sound arrives while the agent speaks: a browser takes five seconds and more to see that its path is gone,
   * and then the sentence is over.
   */
  async _watch() {
    const peer = this._peer;
    if (!peer || this.state !== "connected" || this._looking) return;
    if (!this._captions.sounding()) return void (this._flow = null);
    this._looking = true;
    try {
      let received = 0;
      for (const report of (await peer.getStats()).values()) {
        if (report.type === "inbound-rtp" && report.kind === "audio") received += report.packetsReceived ?? 0;
      }
      const now = performance.now();
      if (peer !== this._peer || this.state !== "connected") return;
      if (this._flow?.received !== received) {
        this._flow = { received, since: now };
        this._patience = 0;
        return;
      }
      if (now - this._flow.since <= STALLED) return;
      this._lookAround();
      if (!this._restarting && !this._restartTimer) {
        // A browser learns of another network up to two seconds after the old one is gone, and a restart before that finds
        // no path: the next one begins when it has.
        const seen = this._patience ? await networks(this._home) : "";
        const changed = seen !== "" && this._networks !== "" && seen !== this._networks;
        if (peer !== this._peer || this.state !== "connected" || this._restarting || this._restartTimer) return;
        if (!this._patience || changed || now - this._restarted > this._patience) {
          this._patience = Math.min(2 * (this._patience || STALL_PATIENCE / 2), STALL_SPACING);
          this._restarted = now;
          this._hasten();
        }
        this._networks = seen;
      }
    } finally {
      this._looking = false;
    }
  }

  /**
   * Finds out whether the browser has a network that the connection has not been told of, and goes over to it: Chromium tells
   * a connection only when no address has changed for two seconds, and a new window's at once.
   */
  async _lookAround() {
    const peer = this._peer;
    if (this._going || !peer || !this._resource || !globalThis.document?.body) return;
    this._going = true;
    const frame = Object.assign(document.createElement("iframe"), { hidden: true, title: "another network" });
    document.body.append(frame);
    try {
      const [known, found] = await Promise.all([networks(this._home), networks(frame.contentWindow)]);
      const old = known.split(",");
      // Where addresses are hidden (no microphone), nothing can be told.
      if (!known || !found || found.split(",").every(address => old.includes(address))) return;
      // It goes by a connection of the new network once the restart's requests have found one.
      const since = performance.now();
      while (this._restarting && performance.now() - since < RESTART_TIMEOUT) await new Promise(done => setTimeout(done, 20));
      if (peer === this._peer && this._resource) await this._goOver(frame);
    } catch {
      // The old connection is what there is; its restarts go on.
    } finally {
      if (this._window !== frame) frame.remove();
      setTimeout(() => (this._going = false), LOOKING);
    }
  }

  /** Goes on by a connection of `frame`'s window, in the same call. */
  async _goOver(frame) {
    const [old, before] = [this._peer, this._window];
    const made = this._build(frame.contentWindow);
    const { peer } = made;
    let over = false;
    try {
      await peer.setLocalDescription();
      const response = await this._request("POST", this._resource, peer.localDescription.sdp, "application/sdp", {}, RESTART_TIMEOUT);
      const place = new URL(response.headers.get("Location"), this.url).href;
      await peer.setRemoteDescription({ type: "answer", sdp: ranked(await response.text(), 0) });
      await new Promise((connected, failed) => {
        setTimeout(failed, GOING_OVER);
        const look = () => {
          if (peer.connectionState === "connected") connected();
          else if (peer.connectionState === "failed") failed();
        };
        peer.addEventListener("connectionstatechange", look);
        look();
      });
      if (old !== this._peer || this.state === "ended") return;
      over = true;
      clearTimeout(this._restartTimer);
      this._use(made);
      Object.assign(this, { _resource: place, _etag: response.headers.get("ETag"), _generation: 0, _window: frame });
      this._restartTimer = this._pending = this._flow = null;
      this._patience = 0;
      if (made.stream) this._hear(made.stream);
      this._transport();
      this._tell("moved", {});
    } finally {
      if (over) old.close();
      else peer.close();
      if (over) before?.remove();
    }
  }

  /** Restarts ICE of a call that has stood, now. It stays `connected` unless the browser says otherwise. */
  _hasten() {
    if (this.state !== "connected" && this.state !== "reconnecting") return;
    clearTimeout(this._restartTimer);
    this._restartTimer = null;
    this._restart(0, true);
  }

  /** Restarts ICE: same call, same keys, another network path. */
  _restart(wait, quietly = false) {
    if (this._restartTimer || this._restarting) return;
    this._restartTimer = setTimeout(async () => {
      this._restartTimer = null;
      const peer = this._peer;
      if (!peer || this.state === "ended") return;
      const attempt = this._restarts ?? 0;
      if (!this._resource || attempt >= RESTART_WAITS.length) {
        this._failed?.(new CallError("no path to the gateway: UDP is blocked and no TURN server helps", { code: "no_path" }));
        return this._renew("lost");
      }
      let again = false;
      // What stands, as far as the browser knows, counts no attempts: no event would clear the count.
      if (!quietly) {
        this._restarts = attempt + 1;
        this._set("reconnecting");
      }
      this._restarting = true;
      try {
        this._pending = null; // candidates of the old generation
        await peer.setLocalDescription(await peer.createOffer({ iceRestart: true }));
        // At once, with what candidates there are: the gateway learns our addresses from our checks anyway.
        const fragment = fragmentOf(peer.localDescription.sdp);
        const response = await this._patchOften(fragment);
        if (peer !== this._peer) return; // it has gone over meanwhile
        this._etag = response.headers.get("ETag") ?? this._etag;
        if (response.status !== 204) {
          const sdp = withFragment(peer.currentRemoteDescription.sdp, ranked(await response.text(), ++this._generation));
          await peer.setRemoteDescription({ type: "answer", sdp });
        }
      } catch (error) {
        if (peer !== this._peer) return;
        again = quietly;
        if (error.code === "unreachable") this._down = true;
        if (error.status === 404 || error.status === 409) {
          // The session is over: the agent hung up, or the gateway was away and came back without it.
          this._resource = null;
          const lost = this._down || (await this._wasLost());
          return lost ? this._renew("lost") : this._end("remote");
        }
      } finally {
        this._restarting = false;
        this._restarted = performance.now();
      }
      this._flush();
      if (again || this.state === "reconnecting") this._restart(RESTART_WAITS[Math.min(attempt + 1, RESTART_WAITS.length - 1)]);
    }, wait);
  }

  /** Whether nobody wanted the call to end, by its record: a gateway may be back before anybody has asked it in vain. */
  async _wasLost() {
    const record = await this._json("GET", "v1/records/" + this.id).catch(() => null); // it may keep none
    return ["gateway stopped", "lost", "failed"].includes(record?.cause);
  }

  /**
   * Asks for a restart, and again while no answer comes: each request that hangs occupies a connection of the old network, so
   * that sooner or later one goes by a new connection, of the network there is now.
   */
  async _patchOften(fragment) {
    const resource = this._resource;
    const ask = () => this._request("PATCH", resource, fragment, "application/trickle-ice-sdpfrag", { "If-Match": "*" }, RESTART_TIMEOUT);
    let answered = false;
    const asked = [];
    for (const wait of RESTART_ASKS) {
      const due = new Promise(done => setTimeout(done, wait));
      // The gateway has nothing new to say to who asks a second time (204): what it says stands in its other answer.
      const full = wait ? due.then(() => (answered ? asked[0] : ask())) : ask();
      asked.push(full.then(response => {
        if (response.status === 204) throw new CallError("another request was answered", { code: "answered" });
        answered = true;
        return response;
      }));
    }
    try {
      return await Promise.any(asked);
    } catch (error) {
      throw error.errors?.find(one => one.code !== "answered") ?? error;
    }
  }

  _trickle(candidate) {
    if (!candidate || !candidate.candidate) return;
    (this._pending ??= []).push("a=" + candidate.candidate);
    if (this._resource) this._flush();
  }

  _flush() {
    if (!this._pending?.length || this._sending || this._restarting || !this._resource) return;
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
    // One for all connections of a call: where a click is wanted, it has been given to this one.
    this._audio ??= this._options.audio ?? Object.assign(document.createElement("audio"), { autoplay: true });
    // Safari plays nothing that is not inline.
    this._audio.playsInline = true;
    this._audio.srcObject = stream;
    if (this._options.speaker && this._audio.setSinkId) this._audio.setSinkId(this._options.speaker).catch(() => {});
    this._audio.play().then(() => (this.blocked = false), error => {
      if (error.name !== "NotAllowedError") return;
      this.blocked = true;
      this._tell("blocked", {});
    });
    this.remoteStream = stream;
    this._meter("output", stream);
  }

  /** Safari and Chromium let sound begin only where a click is still fresh: before the first wait. */
  _unlock() {
    const Context = globalThis.AudioContext ?? globalThis.webkitAudioContext;
    try {
      this._context = Context ? new Context() : null;
      this._context?.resume().catch(() => {});
    } catch {
      this._context = null; // without Web Audio there are no levels, but there is a call
    }
  }

  /** Level of a stream in dBFS, by an analyser that is read only while somebody listens for `level`. */
  _meter(side, stream) {
    this._analysers ??= {};
    this._analysers[side]?.source.disconnect();
    delete this._analysers[side];
    if (!stream?.getAudioTracks().length || !this._context) return;
    try {
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
    if (frame.type === "info" && frame.name === "speaking") this.stats().catch(() => {}); // how late sound is by now
    this._captions.take(frame);
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
    if (this._brought) return;
    for (const track of this._microphone?.getTracks() ?? []) track.stop();
  }

  _end(reason) {
    const first = this.state !== "ended";
    this.state = "ended";
    clearInterval(this._levels);
    clearInterval(this._watching);
    globalThis.removeEventListener?.("pagehide", this._leave);
    globalThis.removeEventListener?.("online", this._online);
    for (const kind of GESTURES) globalThis.removeEventListener?.(kind, this._touched);
    globalThis.navigator?.connection?.removeEventListener?.("change", this._moved);
    this._release();
    this._captions.clear();
    this._closeMicrophone();
    this._context?.close?.().catch?.(() => {});
    this._context = this._microphone = null;
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

  async _request(method, path, body, type, extra, limit = REQUEST_TIMEOUT) {
    const abort = new AbortController();
    const timer = setTimeout(() => abort.abort(), limit);
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

/**
 * Captions of both sides, in time with the sound: the gateway says when the first packet of a sentence leaves and how
 * long it takes; between, words are counted off by their length. What was heard at the end is the gateway's word.
 */
class Captions {
  constructor(tell) {
    this.delay = USUAL_DELAY;
    this._tell = tell;
    this._turns = new Map();
    this._callers = 0;
  }

  /** What a turn is to say, where the page knows it beforehand. */
  planned(id, text) {
    const turn = this._turn(id);
    turn.plan = text.trim();
    this._show(id, turn);
  }

  take(frame) {
    const id = frame.utteranceId;
    if (frame.type === "prompt") {
      const caption = { who: "caller", id: "caller-" + this._callers, text: frame.voicePrompt, heard: frame.voicePrompt, final: frame.last === true };
      if (caption.final) this._callers += 1;
      this._tell(caption);
    } else if (frame.type === "interrupt") {
      const turn = this._turn(id);
      Object.assign(turn, { cut: true, truth: frame.utteranceUntilInterrupt });
      this._show(id, turn);
    } else if (frame.type === "info" && frame.name === "speaking") {
      const turn = this._turn(id);
      turn.sentences.push({ text: frame.text, from: performance.now() + this.delay, lasts: Math.max(1, frame.lastsMs) });
      this._show(id, turn);
      this._timer ??= setInterval(() => this._follow(), CAPTION_PERIOD);
    } else if (frame.type === "info" && frame.name === "turnEnded") {
      const turn = this._turn(id);
      // The last words are still on their way: to be heard out, unless they were cut.
      const wait = turn.cut || frame.how !== "done" ? 0 : this.delay;
      setTimeout(() => {
        Object.assign(turn, { truth: frame.heard?.text ?? "", final: true, how: frame.how });
        this._show(id, turn);
        this._turns.delete(id);
      }, wait);
    }
  }

  clear() {
    clearInterval(this._timer);
    this._timer = null;
    this._turns.clear();
  }

  /** Whether, by what the gateway said, sound of the agent is to be arriving. */
  sounding() {
    const now = performance.now();
    for (const turn of this._turns.values()) {
      if (turn.cut || turn.truth != null) continue;
      if (turn.sentences.some(one => now > one.from - this.delay && now < one.from - this.delay + one.lasts)) return true;
    }
    return false;
  }

  _turn(id) {
    let turn = this._turns.get(id);
    if (!turn) this._turns.set(id, (turn = { plan: "", sentences: [], shown: null }));
    return turn;
  }

  _follow() {
    let live = false;
    const now = performance.now();
    for (const [id, turn] of this._turns) {
      this._show(id, turn);
      live ||= turn.truth == null && turn.sentences.some(one => now < one.from + one.lasts);
    }
    if (!live) {
      clearInterval(this._timer);
      this._timer = null;
    }
  }

  /** Tells of a turn if there is something new to see. */
  _show(id, turn) {
    const said = turn.sentences.map(one => one.text).join(" ");
    const text = turn.plan.length > said.length ? turn.plan : said;
    const now = performance.now();
    const heard = turn.truth ?? turn.sentences.map(one => spoken(one.text, (now - one.from) / one.lasts)).filter(Boolean).join(" ");
    const state = JSON.stringify([text, heard, turn.final, turn.cut]);
    if (state === turn.shown || !(text || heard)) return;
    turn.shown = state;
    const caption = { who: "agent", id, text, heard, final: turn.final === true };
    if (turn.cut) caption.cut = true;
    if (turn.how) caption.how = turn.how;
    this._tell(caption);
  }
}

/** The whole words among the first `share` of `text`, by length; a mark at an end of a sentence is a pause. */
function spoken(text, share) {
  if (share >= 1) return text;
  if (!(share > 0)) return "";
  // An ideograph is a word of its own.
  const words = text.match(/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}][\p{P}\s]*|[^\s\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]+\s*/gu) ?? [];
  const weight = word => word.length + 3 * (word.match(/[.!?…。！？]/gu)?.length ?? 0) + (/\p{Script=Han}/u.test(word) ? 3 : 0);
  let left = share * words.reduce((sum, word) => sum + weight(word), 0);
  let end = "";
  for (const word of words) {
    left -= weight(word);
    if (left < 0) break;
    end += word;
  }
  return end.trimEnd();
}

/** The browser's own addresses, as the window `home` would offer them; empty where it does not say in time. Nothing is sent. */
async function networks(home) {
  const probe = new home.RTCPeerConnection();
  try {
    probe.createDataChannel("");
    const found = new Set();
    const all = new Promise(done => {
      probe.onicecandidate = event => {
        const [, , , , address] = event.candidate?.candidate?.split(" ") ?? [];
        // A name in place of an address (mDNS) is another one each time.
        if (address && !address.endsWith(".local")) found.add(address);
        if (!event.candidate) done();
      };
      setTimeout(done, LISTING);
    });
    await Promise.race([probe.setLocalDescription().then(() => all), new Promise(done => setTimeout(done, LISTING))]);
    return [...found].sort().join();
  } catch {
    return "";
  } finally {
    probe.close();
  }
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

/** The ICE part of a description, as a trickle fragment (RFC 8840). */
function fragmentOf(sdp) {
  const lines = sdp.split(/\r?\n/);
  const one = name => lines.find(line => line.startsWith("a=" + name + ":"));
  const candidates = [...new Set(lines.filter(line => line.startsWith("a=candidate:")))];
  return [one("ice-ufrag"), one("ice-pwd"), "m=audio 9 UDP/TLS/RTP/SAVPF 0", one("mid") ?? "a=mid:0", ...candidates, ""].join("\r\n");
}

/**
 * `sdp` with priorities (RFC 8445 section 5.1.2) of the gateway's candidates that rise with each restart. A browser keeps to a
 * pair that worked until it has heard nothing on it for two and a half seconds, unless another that works ranks higher. The
 * lower priority of a pair's two ends ranks it (section 6.1.2.3), so the gateway's is put below all that a browser gives its
 * own addresses, and above relays: pairs of a restart then outrank those before it, and among themselves have the order that
 * they would have had.
 */
function ranked(sdp, generation) {
  const base = 0x1000_0000 + Math.min(generation, 0xff) * 0x8_0000;
  return sdp.replace(/^(a=candidate:\S+ \d+ \S+ )(\d+)/gm, (_, head, priority) => head + (base + Math.floor(priority / 0x2000)));
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
