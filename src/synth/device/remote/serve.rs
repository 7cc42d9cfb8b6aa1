//! The worker's side: an engine that speaks for the gateways that connect.

mod forward;
mod session;
mod status;

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use self::session::session;
use self::status::status;
use super::wire::{SILENCE, STATUS};
use crate::secret::Secret;
use crate::synth::device::Engine;
use crate::voice::copies::Copies;

/// Gateways at a time; more are refused.
const GATEWAYS: usize = 1_024;

/// Who may connect.
#[derive(Clone)]
pub struct Door {
    /// What a gateway must know; empty: nothing.
    pub token: Secret,
    /// `None`: no TLS.
    pub tls: Option<TlsAcceptor>,
}

/// A worker's work, for its gateways and for who stops it. Clones mean the same.
#[derive(Clone)]
pub struct Service {
    engine: Engine,
    /// Where voices of gateways are kept.
    copies: Option<Copies>,
    draining: Arc<watch::Sender<bool>>,
    /// Utterances whose end was not told yet.
    open: Arc<watch::Sender<usize>>,
}

impl Service {
    /// What `engine` speaks is what gateways get.
    pub fn new(engine: Engine) -> Self {
        let (draining, open) = (Arc::new(watch::Sender::new(false)), Arc::new(watch::Sender::new(0)));
        Self { engine, copies: None, draining, open }
    }

    /// Takes voices of gateways into `copies`, a folder of which its devices speak.
    pub fn with_copies(self, copies: Copies) -> Self {
        Self { copies: Some(copies), ..self }
    }

    /// What speaks.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// From now on gateways begin nothing new here; streams that have work end it.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Utterances that are not over.
    pub fn open(&self) -> usize {
        *self.open.borrow()
    }

    /// Waits until there is none.
    pub async fn idle(&self) {
        // An error would say that this is gone.
        let _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// What it is and how busy, as gateways are told.
    pub fn told(&self) -> Told {
        let status = status(&self.engine);
        let most = f64::from(status.load.capacity);
        let sustainable = status.load.sustainable;
        Told {
            sustainable: if sustainable > 0.0 { sustainable.min(most) } else { most },
            live: status.load.live,
            engine: status.engine,
            model: status.model,
            draining: self.is_draining(),
        }
    }
}

/// What a worker tells those who do not know it yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Told {
    /// The kind of its voice; `None`: no device is ready.
    pub engine: Option<String>,
    /// What its model is; workers with the same one make the same audio.
    pub model: Option<String>,
    /// Live streams that it keeps up with.
    pub sustainable: f64,
    /// Live streams that it has.
    pub live: u32,
    /// Whether it takes no new ones.
    pub draining: bool,
}

/// Serves the gateways that connect to `listener` until `stop`.
pub async fn serve(listener: TcpListener, door: Door, service: Service, mut stop: watch::Receiver<bool>) {
    let room = Arc::new(Semaphore::new(GATEWAYS));
    let mut sessions = JoinSet::new();
    loop {
        let (stream, peer) = tokio::select! {
            _ = stop.changed() => break,
            // One that panicked ends alone.
            Some(_) = sessions.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, mostly: they come back as connections end.
                    tracing::warn!(%error, "a gateway was not accepted");
                    tokio::time::sleep(STATUS).await;
                    continue;
                }
            },
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            tracing::warn!(%peer, "as many gateways as may are connected");
            continue;
        };
        let (door, service, stopped) = (door.clone(), service.clone(), stop.clone());
        sessions.spawn(async move {
            let _permit = permit;
            let served = async {
                stream.set_nodelay(true)?;
                match door.tls.clone() {
                    Some(tls) => session(handshake(tls, stream).await?, &door, service, stopped).await,
                    None => session(stream, &door, service, stopped).await,
                }
            };
            if let Err(error) = served.await {
                tracing::info!(%peer, %error, "a gateway is gone");
            }
        });
    }
    // Each ends within a moment, with its last words.
    while sessions.join_next().await.is_some() {}
}

async fn handshake(tls: TlsAcceptor, stream: TcpStream) -> io::Result<impl AsyncRead + AsyncWrite + Send + 'static> {
    timeout(SILENCE, tls.accept(stream)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
