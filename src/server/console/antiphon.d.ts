// Types of the browser client served at /antiphon.js.

export interface ConnectOptions {
  /** The gateway; default: where the module came from. */
  url?: string;
  /** API token or single-use browser token. */
  token?: string;
  /** Name of the agent; default: the gateway's. */
  agent?: string;
  /** true (default), false (listen only), a deviceId, constraints, or a stream of the page's own. */
  microphone?: boolean | string | MediaTrackConstraints | MediaStream;
  /** deviceId of the speaker. */
  speaker?: string;
  /** Element to play on. */
  audio?: HTMLAudioElement;
  /** STUN and TURN servers; default: what the gateway names. */
  iceServers?: RTCIceServer[];
  echoCancellation?: boolean;
  noiseSuppression?: boolean;
  autoGainControl?: boolean;
  /** Whether a session that is lost for good is replaced by a new one (default true; never with a single-use token). */
  reconnect?: boolean;
  /** Ends the call when aborted, also while it is being placed. */
  signal?: AbortSignal;
}

export interface SayOptions {
  interrupt?: boolean;
  voice?: string;
  language?: string;
  instructions?: string;
  seed?: number;
  speed?: number;
}

export type CallState = "idle" | "connecting" | "connected" | "reconnecting" | "ended";

export interface Caption {
  who: "agent" | "caller";
  id: string;
  /** What is said: the sentences so far, all of it where the page asked for it by `say`; what the caller said. */
  text: string;
  /** Its words that the listener has heard by now; at the end, by the gateway's account. */
  heard: string;
  final: boolean;
  /** The turn was cut off. */
  cut?: boolean;
  how?: string;
}

export interface CallStats {
  roundTripMs: number | null;
  jitterMs: number | null;
  lost: number;
  received: number;
  concealedMs: number;
  bufferMs: number | null;
}

export interface CallEvents {
  state: CustomEvent<{ state: CallState; muted: boolean }>;
  frame: CustomEvent<{ type: string; [field: string]: unknown }>;
  caption: CustomEvent<Caption>;
  level: CustomEvent<{ input: number; output: number }>;
  blocked: CustomEvent<Record<string, never>>;
  /** The browser has another network, and the call goes on by another connection; there is nothing to do. */
  moved: CustomEvent<Record<string, never>>;
  /** The session was lost and another begun, with an agent that knows nothing of the first. */
  renewed: CustomEvent<{ id: string; before: string | null }>;
  ended: CustomEvent<{ reason: "hungUp" | "remote" | "lost" | "failed" }>;
}

export class CallError extends Error {
  /** Of the gateway's answer; 0: there was none. */
  readonly status: number;
  readonly code: string;
  /** Seconds after which trying again is worth while. */
  readonly retryAfter: number | null;
}

/** From `connect`. */
export class Call extends EventTarget {
  private constructor();
  readonly id: string | null;
  readonly url: string;
  readonly agent: string | null;
  readonly state: CallState;
  readonly muted: boolean;
  /** The browser wants a click before it plays. */
  readonly blocked: boolean;
  readonly remoteStream?: MediaStream;
  say(text: string, options?: SayOptions): Promise<string>;
  interrupt(): Promise<void>;
  send(frame: object | string): void;
  digits(digits: string): Promise<void>;
  mute(muted?: boolean): void;
  setMicrophone(choice: NonNullable<ConnectOptions["microphone"]>): Promise<void>;
  setSpeaker(deviceId: string): Promise<void>;
  play(): Promise<void>;
  levels(): { input: number; output: number };
  stats(): Promise<CallStats>;
  hangUp(): Promise<void>;
  addEventListener<K extends keyof CallEvents>(type: K, listener: (event: CallEvents[K]) => void, options?: AddEventListenerOptions | boolean): void;
  addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: AddEventListenerOptions | boolean): void;
  removeEventListener<K extends keyof CallEvents>(type: K, listener: (event: CallEvents[K]) => void, options?: EventListenerOptions | boolean): void;
  removeEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: EventListenerOptions | boolean): void;
}

export function connect(options?: ConnectOptions): Promise<Call>;
export function devices(): Promise<{ microphones: { id: string; label: string }[]; speakers: { id: string; label: string }[] }>;
