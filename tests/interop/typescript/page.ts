// A page that uses every member of the browser client. It is compiled and not run.

import { Call, CallError, connect, devices } from "../../../src/server/console/antiphon.js";
import type {
  CallEvents, CallState, CallStats, Caption, ConnectOptions, SayOptions,
} from "../../../src/server/console/antiphon.js";

const abort = new AbortController();
const options: ConnectOptions = {
  url: "https://gateway.example.com/",
  token: "token",
  agent: "support",
  microphone: { sampleRate: 48_000 },
  speaker: "default",
  audio: document.createElement("audio"),
  iceServers: [{ urls: "stun:stun.example.com" }],
  echoCancellation: true,
  noiseSuppression: true,
  autoGainControl: true,
  reconnect: false,
  signal: abort.signal,
};
const manner: SayOptions = { interrupt: true, voice: "anna", language: "en", instructions: "Calm.", seed: 1, speed: 1.1 };

function show(caption: Caption): string {
  const who: "agent" | "caller" = caption.who;
  return [who, caption.id, caption.text, caption.heard, caption.final, caption.cut ?? false, caption.how ?? "done"].join(" ");
}

function onLevel(event: CallEvents["level"]): void {
  console.log(event.detail.input + event.detail.output);
}

export async function page(): Promise<string[]> {
  const { microphones, speakers } = await devices();
  const names: string[] = [...microphones, ...speakers].map(device => device.id + device.label);
  let call: Call;
  try {
    call = await connect(options);
  } catch (error) {
    if (error instanceof CallError) return [error.code, String(error.status), String(error.retryAfter ?? 0), error.message];
    throw error;
  }
  const state: CallState = call.state;
  const place: [string | null, string, string | null, MediaStream | undefined] = [call.id, call.url, call.agent, call.remoteStream];
  call.addEventListener("state", event => console.log(event.detail.state satisfies CallState, event.detail.muted));
  call.addEventListener("frame", event => console.log(event.detail.type, event.detail["utteranceId"]));
  call.addEventListener("caption", event => show(event.detail), { once: true });
  call.addEventListener("level", onLevel);
  call.removeEventListener("level", onLevel);
  call.addEventListener("blocked", () => call.play());
  call.addEventListener("moved", () => {});
  call.addEventListener("renewed", event => names.push(event.detail.id, event.detail.before ?? ""));
  call.addEventListener("ended", event => {
    const reason: "hungUp" | "remote" | "lost" | "failed" = event.detail.reason;
    names.push(reason);
  });
  const said: string = await call.say("Hello.", manner);
  await call.interrupt();
  call.send({ type: "text", token: "Hello.", last: true });
  call.send("{}");
  await call.digits("12#");
  call.mute();
  call.mute(!call.muted);
  for (const choice of [true, false, "id", { deviceId: "id" }, new MediaStream()]) await call.setMicrophone(choice);
  await call.setSpeaker(speakers[0]?.id ?? "");
  if (call.blocked) await call.play();
  const { input, output } = call.levels();
  const stats: CallStats = await call.stats();
  const figures: (number | null)[] = [
    input, output, stats.roundTripMs, stats.jitterMs, stats.lost, stats.received, stats.concealedMs, stats.bufferMs,
  ];
  await call.hangUp();

  // @ts-expect-error: calls come from `connect`
  new Call({});
  // @ts-expect-error: what a call says of itself is not the page's to set
  call.state = "idle";
  // @ts-expect-error: no such option
  await connect({ mic: true });
  // @ts-expect-error: levels are numbers
  call.addEventListener("level", event => event.detail.input.length);
  return [state, said, ...names, ...place.map(String), ...figures.map(String)];
}
