//! One gateway taking the place of another on the same machine: who says what when. What is passed, and why so, is told in
//! [`crate::handover`].

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::StartError;
use crate::gateway::Gateway;
use crate::handover::{self, Name, Passed, Place, Word};
use crate::server;
use crate::synth::device::Phase;

/// The socket that a successor asks at, in the state directory.
const NAME: &str = "handover.sock";
/// The version of what is said: another one is refused, and the new program started after the old one has ended.
const VERSION: u32 = 1;
/// How long the other side may take for its part. Batch work in hand ends first; voices are loaded by then.
const LIMIT: Duration = Duration::from_secs(60);
/// Words to the other side that may wait.
const WORDS: usize = 4_096;
/// How often the old gateway looks which calls it has.
const LOOK: Duration = Duration::from_millis(200);

/// What the new gateway asks.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    version: u32,
}

/// What the old one answers, with a descriptor for each name.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// Why not; then there are no sockets.
    refused: Option<String>,
    sockets: Vec<String>,
}

/// The gateway whose place is being taken.
pub(super) struct Predecessor {
    stream: StdStream,
}

impl Predecessor {
    /// The gateway that runs with the state directory `dir`, and its listening sockets; `None`: none runs that can be asked.
    ///
    /// # Errors
    /// It does not give its place.
    pub(super) async fn ask(dir: &Path) -> Result<Option<(Self, Passed)>, StartError> {
        let path = dir.join(NAME);
        // Waits for the other process.
        let asked = tokio::task::spawn_blocking(move || ask(&path)).await;
        let asked = asked.unwrap_or_else(|_| Err(io::Error::other("asking failed")));
        asked.map_err(|error| StartError::Handover(error.to_string()))
    }

    /// Everything is bound: the old one stops to read, and `place` begins. What is its own goes to it from now on.
    ///
    /// # Errors
    /// It is gone, or did not understand.
    pub(super) async fn relieve(self, place: &Place, answers: Answers) -> Result<(), StartError> {
        let told = |error: io::Error| StartError::Handover(error.to_string());
        let answering = answers.at("after").map_err(told)?;
        self.stream.set_nonblocking(true).map_err(told)?;
        let mut stream = UnixStream::from_std(self.stream).map_err(told)?;
        let answered = async {
            handover::write(&mut stream, &Word::Ready { http: Some(answering.path()) }).await?;
            handover::read(&mut stream).await
        };
        let answer = tokio::time::timeout(LIMIT, answered).await.map_err(|_| told(io::ErrorKind::TimedOut.into()))?;
        let Word::Yours { http, calls } = answer.map_err(told)? else {
            return Err(told(io::ErrorKind::InvalidData.into()));
        };
        let client = client(http).map_err(told)?;
        // overflow: drops (counted), by who passes a datagram on
        let (outlet, words) = mpsc::channel(WORDS);
        place.follow(calls, outlet, client);
        place.hold(true);
        tokio::spawn(accompany(stream, words, place.clone(), answering));
        Ok(())
    }
}

fn ask(path: &Path) -> io::Result<Option<(Predecessor, Passed)>> {
    let Ok(stream) = StdStream::connect(path) else { return Ok(None) };
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    handover::send(&stream, &serde_json::to_vec(&Ask { version: VERSION })?, &[])?;
    let (text, descriptors) = handover::receive(&stream)?;
    let answer: Answer = serde_json::from_slice(&text)?;
    if let Some(reason) = answer.refused {
        return Err(io::Error::other(reason));
    }
    let names = answer.sockets.iter().map(|name| Name::parse(name)).collect::<Option<Vec<_>>>();
    let names = names.filter(|names| names.len() == descriptors.len());
    let names = names.ok_or_else(|| io::Error::other("it passes sockets that this version does not know"))?;
    Ok(Some((Predecessor { stream }, names.into_iter().zip(descriptors).collect())))
}

/// What asks the other gateway at its socket.
fn client(path: String) -> io::Result<reqwest::Client> {
    let client = reqwest::Client::builder().unix_socket(PathBuf::from(path)).no_proxy().build();
    client.map_err(|error| io::Error::other(format!("no HTTP client: {error}")))
}

/// What answers requests that the other gateway passes on.
#[derive(Clone)]
pub(super) struct Answers {
    pub(super) dir: PathBuf,
    pub(super) router: Router,
    pub(super) stop: watch::Receiver<bool>,
}

impl Answers {
    /// Answers at a socket of its own until that is dropped. `name`: one process may take a place and lend it later.
    fn at(&self, name: &str) -> io::Result<Answering> {
        let path = self.dir.join(format!("{name}-{}.sock", std::process::id()));
        let listener = bind(&self.dir, &path)?;
        let answering = tokio::spawn(server::serve_passed(listener, self.router.clone(), self.stop.clone()));
        Ok(Answering(path, answering.abort_handle()))
    }
}

/// A socket that this user alone may use.
fn bind(dir: &Path, path: &Path) -> io::Result<UnixListener> {
    std::fs::create_dir_all(dir)?;
    // One that a process left which was killed.
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Says to the old gateway what is its own, and hears what it has, until it has ended. `_answering`: until then it asks.
async fn accompany(stream: UnixStream, mut words: mpsc::Receiver<Word>, place: Place, _answering: Answering) {
    let (mut from, mut to) = stream.into_split();
    let saying = async {
        while let Some(word) = words.recv().await {
            if handover::write(&mut to, &word).await.is_err() {
                break;
            }
        }
    };
    let hearing = async {
        loop {
            match handover::read(&mut from).await {
                Ok(Word::Calls(calls)) => place.theirs(calls),
                Ok(Word::Left(calls)) => place.left(calls),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    };
    tokio::select! {
        () = saying => {}
        () = hearing => {}
    }
    place.alone();
    tracing::info!("the gateway before this one has ended");
}

/// What a gateway needs to let another take its place.
pub(super) struct Offer {
    pub(super) gateway: Gateway,
    /// Its folder is where others ask for the place, too.
    pub(super) answers: Answers,
    /// This one has taken a place itself: the socket there is of the one that had it.
    pub(super) follows: bool,
    /// Cancelled when another has the place and no call is left here.
    pub(super) left: CancellationToken,
}

impl Offer {
    /// Lets other gateways take the place of this one, until one has it and no call is left here.
    pub(super) async fn stand(self) {
        let dir = &self.answers.dir;
        let path = dir.join(NAME);
        if !self.follows && StdStream::connect(&path).is_ok() {
            tracing::info!(path = %path.display(), "another gateway runs with this state directory: no third can take the place of this one");
            return;
        }
        let mut stop = self.answers.stop.clone();
        loop {
            // Anew each time: who takes the place puts a socket of its own there.
            let listener = match bind(dir, &path) {
                Ok(listener) => listener,
                Err(error) => {
                    tracing::info!(%error, path = %path.display(), "no other gateway can take this one's place");
                    return;
                }
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            // Who comes now is refused at once and need not wait.
            drop(listener);
            let Ok((stream, _)) = accepted else {
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            match self.lend(stream).await {
                Ok(()) => return self.left.cancel(),
                Err(error) => {
                    tracing::warn!(%error, "another gateway began to take this one's place; this one has it still")
                }
            }
        }
        let _ = std::fs::remove_file(path);
    }

    /// Gives the place to who asks, and returns when no call is left here.
    async fn lend(&self, stream: UnixStream) -> io::Result<()> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let (place, jobs) = (self.gateway.place.clone(), self.gateway.jobs.clone());
        // Waits for the other process, and for the batch work in hand.
        let passed = tokio::task::spawn_blocking(move || {
            let (text, _) = handover::receive(&stream)?;
            let Ask { version } = serde_json::from_slice(&text)?;
            let refused = if version != VERSION {
                Some(format!("it speaks version {VERSION} of handing over, not {version}: start after it has ended"))
            } else if place.follows() {
                Some(
                    "the gateway before it still has calls: try again when they have ended (antiphon_handover_calls)"
                        .into(),
                )
            } else {
                None
            };
            if let Some(reason) = refused {
                let answer = Answer { refused: Some(reason.clone()), sockets: Vec::new() };
                handover::send(&stream, &serde_json::to_vec(&answer)?, &[])?;
                return Err(io::Error::other(reason));
            }
            let sockets = place.duplicates()?;
            jobs.park();
            let names = sockets.iter().map(|(name, _)| name.as_str().to_owned()).collect();
            let answer = serde_json::to_vec(&Answer { refused: None, sockets: names })?;
            let descriptors: Vec<_> = sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
            handover::send(&stream, &answer, &descriptors)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        let outcome = async {
            let stream = passed.await.unwrap_or_else(|_| Err(io::Error::other("passing sockets failed")))?;
            self.leave(UnixStream::from_std(stream)?).await
        };
        let outcome = outcome.await;
        if outcome.is_err() {
            self.gateway.place.hold(true);
            self.gateway.place.precede(None);
            let jobs = self.gateway.jobs.clone();
            // A panic there was logged when it happened.
            let _ = tokio::task::spawn_blocking(move || jobs.resume()).await;
        }
        outcome
    }

    /// Waits for the successor to be ready, stops to read, and ends with the last call. `Err`: the successor is gone.
    async fn leave(&self, mut stream: UnixStream) -> io::Result<()> {
        let ready = tokio::time::timeout(LIMIT, handover::read(&mut stream)).await;
        let Ok(Ok(Word::Ready { http })) = ready else { return Err(io::Error::other("it did not start")) };
        let answering = self.answers.at("http")?;
        self.gateway.place.precede(http.map(client).transpose()?);
        self.gateway.place.hold(false);
        let mut told = self.call_ids();
        let http = answering.path();
        handover::write(&mut stream, &Word::Yours { http, calls: told.clone() }).await?;
        tracing::info!(
            calls = self.remaining(),
            "another gateway has this one's place; this one ends with its last call"
        );
        let (mut from, mut to) = stream.into_split();
        let place = self.gateway.place.clone();
        let hearing = async {
            loop {
                match handover::read(&mut from).await {
                    Ok(Word::Passed(kind, datagram)) => place.arrive(kind, datagram),
                    Ok(_) => {}
                    Err(error) => return error,
                }
            }
        };
        let saying = async {
            let mut look = tokio::time::interval(LOOK);
            let mut empty = 0;
            loop {
                look.tick().await;
                // Calls that this one placed or took since, as of a transfer.
                let now = self.call_ids();
                let new: Vec<String> = now.into_iter().filter(|id| !told.contains(id)).collect();
                if !new.is_empty() {
                    told.extend(new.iter().cloned());
                    handover::write(&mut to, &Word::Calls(new)).await?;
                }
                let remaining = self.remaining();
                handover::write(&mut to, &Word::Left(u32::try_from(remaining).unwrap_or(u32::MAX))).await?;
                // Twice: between two parts of a call that begins none of them may have it.
                empty = if remaining == 0 { empty + 1 } else { 0 };
                if empty == 2 {
                    return Ok(());
                }
            }
        };
        tokio::select! {
            error = hearing => Err(error),
            said = saying => said,
        }
    }

    fn call_ids(&self) -> Vec<String> {
        self.gateway.sip.as_ref().map(|sip| sip.call_ids()).unwrap_or_default()
    }

    /// Calls, sessions and speech that only this process can end.
    fn remaining(&self) -> usize {
        let gateway = &self.gateway;
        let telephones = gateway.sip.as_ref().map_or(0, |sip| sip.calls());
        let calls = gateway.calls.count().max(telephones + gateway.webrtc.count());
        let ringing = gateway.outgoing.list().len();
        let devices = gateway.engine.status();
        let spoken: u32 =
            devices.iter().filter(|device| device.phase == Phase::Ready).map(|device| device.load.live).sum();
        calls.max(ringing).max(usize::try_from(spoken).unwrap_or(usize::MAX))
    }
}

/// Ends a listener and removes its file.
struct Answering(PathBuf, tokio::task::AbortHandle);

impl Answering {
    fn path(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.1.abort();
        let _ = std::fs::remove_file(&self.0);
    }
}
