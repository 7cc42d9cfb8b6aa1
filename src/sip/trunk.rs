//! Registration at trunks, and who a trunk is.
//!
//! One task a trunk: it keeps the addresses of the trunk's host known (calls from there need no password of
//! ours) and, with `register = true`, the registration alive.

use std::{net::IpAddr, sync::Arc, time::Duration};

use rsipstack::{
    dialog::registration::{Registration, backoff_interval, refresh_interval},
    sip::{HostWithPort, StatusCodeKind, typed::Contact},
};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{
    config::{Transport, TrunkConfig},
    dialplan::registrar,
    outbound::credential,
    shared::Shared,
};

/// Lifetime asked for.
const EXPIRES: u32 = 600;
/// Between look-ups of a host that is not registered with.
const LOOK_UP: Duration = Duration::from_secs(300);
/// How long unregistering may hold up a shutdown.
const FAREWELL: Duration = Duration::from_secs(2);

/// Keeps the trunk at `index` until the endpoint stops.
pub(super) async fn keep(shared: Arc<Shared>, index: usize) {
    let Some(config) = shared.config.trunk.get(index).cloned() else { return };
    let mut registration = Registration::new(shared.stack.clone(), credential(&config));
    let mut failures = 0;
    loop {
        let addresses = shared.look_up(&config.host).await;
        let known = addresses.first().copied();
        if let Ok(host) = HostWithPort::try_from(config.host.as_str()) {
            addresses.iter().for_each(|address| shared.carriers.found(&host.host, *address));
        }
        let wait = if config.register {
            match register(&shared, &config, &mut registration, known, EXPIRES).await {
                Ok(expires) => {
                    if failures > 0 || shared.trunk_state(index, |s| s.status.registered) == Some(Some(false)) {
                        info!(trunk = config.name, expires, "registered");
                    }
                    failures = 0;
                    shared.trunk_state(index, |s| {
                        s.status.registered = Some(true);
                        s.status.error = None;
                    });
                    refresh_interval(expires)
                }
                Err(error) => {
                    warn!(trunk = config.name, error, "registration failed");
                    shared.trunk_state(index, |s| {
                        s.status.registered = Some(false);
                        s.status.error = Some(error);
                    });
                    failures += 1;
                    backoff_interval(failures)
                }
            }
        } else {
            LOOK_UP
        };
        tokio::select! {
            () = shared.stop.cancelled() => break,
            () = sleep(wait) => {}
        }
    }
    if shared.trunk_state(index, |s| s.status.registered) == Some(Some(true)) {
        timeout(FAREWELL, register(&shared, &config, &mut registration, None, 0)).await.ok();
    }
}

async fn register(
    shared: &Shared,
    config: &TrunkConfig,
    registration: &mut Registration,
    peer: Option<IpAddr>,
    expires: u32,
) -> Result<u32, String> {
    let server = registrar(config).map_err(|e| e.to_string())?;
    if registration.contact.is_none() {
        let transport = match config.transport {
            Transport::Udp => rsipstack::sip::Transport::Udp,
            Transport::Tcp => rsipstack::sip::Transport::Tcp,
            Transport::Tls => rsipstack::sip::Transport::Tls,
        };
        let uri = shared.contact(config.username.as_deref(), transport, peer);
        registration.contact = Some(Contact { display_name: None, uri, params: vec![] });
    }
    let response = registration.register(server, Some(expires)).await.map_err(|e| e.to_string())?;
    match response.status_code.kind() {
        StatusCodeKind::Successful => Ok(registration.expires()),
        _ => Err(format!("{} {}", response.status_code.code(), response.status_code.text())),
    }
}
