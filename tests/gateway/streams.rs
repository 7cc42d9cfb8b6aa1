//! Bots that hear and speak sound: the gateway dials them and carries a call as Twilio Media Streams frames.

use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon_loadgen::call::{End, now};
use antiphon_loadgen::codec::Codec;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use super::support::{PATIENCE, Rig};
use super::voice::voice;

/// A bot as anybody would write it for Twilio, and the gateway that dials it.
struct Bot {
    listener: TcpListener,
}

/// One stream to it.
struct Stream {
    socket: WebSocketStream<TcpStream>,
    start: Value,
    /// Mu-law or linear.
    rate: u32,
}

impl Bot {
    async fn bind() -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("ws://{}/stream", listener.local_addr().expect("bound"));
        (Self { listener }, url)
    }

    async fn next(&self) -> Stream {
        self.next_after(Duration::ZERO).await
    }

    /// The next stream, whose handshake is answered so much later.
    async fn next_after(&self, time: Duration) -> Stream {
        let (socket, _) =
            timeout(PATIENCE, self.listener.accept()).await.expect("it is dialled").expect("a connection");
        tokio::time::sleep(time).await;
        let socket = tokio_tungstenite::accept_async(socket).await.expect("a handshake");
        let mut stream = Stream { socket, start: Value::Null, rate: 0 };
        assert_eq!(stream.frame().await["event"], "connected");
        stream.start = stream.frame().await;
        assert_eq!(stream.start["event"], "start");
        stream.rate = stream.start["start"]["mediaFormat"]["sampleRate"].as_u64().expect("a rate") as u32;
        stream
    }
}

impl Stream {
    async fn frame(&mut self) -> Value {
        let next = async {
            loop {
                match self.socket.next().await.expect("the stream lives").expect("a message") {
                    Message::Text(text) => return serde_json::from_str(text.as_str()).expect("JSON"),
                    Message::Close(_) => panic!("closed"),
                    _ => {}
                }
            }
        };
        timeout(PATIENCE, next).await.expect("a frame comes")
    }

    /// The next frame of that kind; others are passed over.
    async fn find(&mut self, event: &str) -> Value {
        loop {
            let frame = self.frame().await;
            if frame["event"] == event {
                return frame;
            }
        }
    }

    async fn send(&mut self, mut frame: Value) {
        frame["streamSid"] = self.start["streamSid"].clone();
        self.socket.send(Message::text(frame.to_string())).await.expect("sent");
    }

    /// Plays a tone for so long, in one piece, faster than it sounds.
    async fn play(&mut self, time: Duration) {
        let samples = (time.as_secs_f64() * f64::from(self.rate)) as usize;
        let wave = |n: usize| (std::f64::consts::TAU * 500.0 * n as f64 / f64::from(self.rate)).sin() * 9_000.0;
        let pcm: Vec<i16> = (0..samples).map(|n| wave(n) as i16).collect();
        let bytes: Vec<u8> = if self.rate == 8_000 {
            let mut bytes = vec![0; pcm.len()];
            antiphon::media::encode::mu_law_into(&pcm, &mut bytes);
            bytes
        } else {
            pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect()
        };
        self.send(json!({ "event": "media", "media": { "payload": STANDARD.encode(bytes) } })).await;
    }

    async fn mark(&mut self, name: &str) {
        self.send(json!({ "event": "mark", "mark": { "name": name } })).await;
    }

    /// Waits until the caller is heard, and stops being so for half a second; gives how long that was.
    async fn hears_out(&mut self) -> Duration {
        let (mut loud, mut quiet) = (0, 0);
        while loud == 0 || quiet < 25 {
            let frame = self.find("media").await;
            let bytes = STANDARD.decode(frame["media"]["payload"].as_str().expect("sound")).expect("base64");
            let is_loud = bytes.iter().any(|byte| byte & 0x7f < 0x50);
            loud += u32::from(is_loud);
            quiet = if is_loud { 0 } else { quiet + 1 };
        }
        Duration::from_millis(20) * loud
    }

    /// Waits until the caller is heard: 100 ms that are not silence. Gives the length of a payload.
    async fn hears(&mut self) -> usize {
        let mut loud = 0;
        loop {
            let frame = self.find("media").await;
            assert_eq!(frame["media"]["track"], "inbound", "a bot hears the caller, and not itself");
            let bytes = STANDARD.decode(frame["media"]["payload"].as_str().expect("sound")).expect("base64");
            let is_loud = match self.rate {
                8_000 => bytes.iter().any(|byte| byte & 0x7f < 0x40),
                _ => bytes.chunks_exact(2).any(|s| i16::from_le_bytes([s[0], s[1]]).unsigned_abs() > 1_000),
            };
            loud += usize::from(is_loud);
            if loud >= 5 {
                return bytes.len();
            }
        }
    }
}

async fn rig(url: &str, rate: u32) -> Rig {
    let agent = Agent { media: Some(url.to_owned()), media_rate: rate, ..Agent::at("") };
    Rig::with(|config| {
        config.agent.insert("bot".into(), agent);
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_caller_says_before_the_bots_link_is_there_reaches_it_too() {
    let (bot, url) = Bot::bind().await;
    let rig = rig(&url, 8_000).await;
    let said = {
        let mut voice = voice();
        voice.pcm.truncate(voice.rate as usize * 3 / 2);
        voice
    };
    let mut heard = Vec::new();
    for late in [Duration::ZERO, Duration::from_millis(1_500)] {
        let call = rig.telephone("bot", Codec::Pcmu).await;
        let (stream, spoke) = tokio::join!(bot.next_after(late), call.say(&said));
        spoke.expect("the caller speaks");
        let mut stream = stream;
        heard.push(stream.hears_out().await);
        call.hang_up().await;
    }
    // What a handshake of no time costs, both have in common; the rest of the words was over before the second.
    assert!(heard[1] + Duration::from_millis(200) >= heard[0] && heard[0] > Duration::from_millis(600), "{heard:?}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_media_streams_bot_sits_on_a_telephone_call() {
    let (bot, url) = Bot::bind().await;
    let rig = rig(&url, 8_000).await;
    let call = rig.telephone("bot", Codec::Pcmu).await;
    let mut stream = bot.next().await;
    let start = &stream.start["start"];
    assert_eq!((&start["callSid"], &start["tracks"]), (&json!(call.id()), &json!(["inbound"])));
    assert_eq!(start["mediaFormat"], json!({ "encoding": "audio/x-mulaw", "sampleRate": 8_000, "channels": 1 }));
    assert_eq!(start["streamSid"], stream.start["streamSid"]);

    // It hears the caller, and a key.
    call.say(&voice()).await.expect("the caller speaks");
    assert_eq!(stream.hears().await, 160);
    call.press("5").await.expect("keys go out");
    assert_eq!(stream.find("dtmf").await["dtmf"]["digit"], "5");

    // It is heard, and told when. The caller who still speaks cuts nothing off: that is the bot's to do.
    let asked = now();
    stream.play(Duration::from_secs(2)).await;
    stream.mark("said").await;
    assert_eq!(stream.find("mark").await["mark"]["name"], "said");
    let onset = call.onset(asked, PATIENCE).await.expect("the tone is heard");
    let end = call.silence(onset, Duration::from_millis(500), PATIENCE).await.expect("the tone ends");
    let heard = call.ear().heard().clip_between(asked, end + Duration::from_millis(200));
    let tone = heard.pcm.iter().filter(|sample| sample.abs() > 0.05).count();
    assert!(tone > heard.rate as usize * 3 / 2, "{tone} samples at {} Hz of two seconds", heard.rate);

    // What waits is thrown away.
    let asked = now();
    stream.play(Duration::from_secs(60)).await;
    stream.mark("cleared").await;
    call.onset(asked, PATIENCE).await.expect("it sounds");
    stream.send(json!({ "event": "clear" })).await;
    assert_eq!(stream.find("mark").await["mark"]["name"], "cleared", "as soon as nothing waits before it");
    call.silence(now(), Duration::from_secs(1), PATIENCE).await.expect("it is silent");

    // A bot that closes its stream has finished with the call.
    stream.socket.close(None).await.expect("closed");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_is_opened_again_and_carries_the_wide_band() {
    let (bot, url) = Bot::bind().await;
    for rate in [16_000, 24_000] {
        let rig = rig(&url, rate).await;
        let call = rig.browser("bot").await;
        let stream = bot.next().await;
        let first = stream.start["streamSid"].clone();
        // Gone without a word.
        drop(stream);
        let mut stream = bot.next().await;
        assert_ne!(stream.start["streamSid"], first, "it is another stream");
        let format = &stream.start["start"]["mediaFormat"];
        assert_eq!(*format, json!({ "encoding": "audio/x-l16", "sampleRate": rate, "channels": 1 }));
        call.say(&voice()).await.expect("the caller speaks");
        assert_eq!(stream.hears().await, rate as usize / 50 * 2, "20 ms");
        let asked = now();
        stream.play(Duration::from_secs(1)).await;
        call.onset(asked, PATIENCE).await.expect("the tone is heard");
        // Nonsense costs nothing.
        stream.send(json!({ "event": "what is this" })).await;
        stream.mark("still there").await;
        assert_eq!(stream.find("mark").await["mark"]["name"], "still there");
        call.hang_up().await;
        assert_eq!(stream.find("stop").await["stop"]["callSid"], stream.start["start"]["callSid"]);
        rig.app.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bot_that_is_not_there_costs_its_call_an_apology() {
    let (bot, url) = Bot::bind().await;
    drop(bot);
    let rig = rig(&url, 8_000).await;
    let call = rig.telephone("bot", Codec::Pcmu).await;
    call.onset(call.setup().asked, PATIENCE).await.expect("an apology is heard");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}
