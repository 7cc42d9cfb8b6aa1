//! Registration at trunks, who a trunk is, and whether it lives.
//!
//! One task a trunk: it keeps the addresses of the trunk's hosts known (calls from there need no password of
//! ours) and, with `register = true`, the registration alive, and made anew when its connection is gone. With `options_s` another task asks every host by OPTIONS
//! whether it lives; what that means is for [`super::targets`] to say.

use std::{collections::VecDeque, net::IpAddr, sync::Arc, time::Duration};

use futures_util::future::join_all;
use metrics::{counter, gauge};

use rsipstack::{
    dialog::registration::{Registration, backoff_interval, refresh_interval},
    sip::{HostWithPort, StatusCode, StatusCodeKind, typed},
    transport::SipAddr,
};
use tokio::{
    sync::watch as channel,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    config::{SipConfig, TrunkConfig},
    dialplan::registrar,
    flow::{self, Losses, wire},
    names,
    outbound::credential,
    shared::{Shared, look_up},
};
use crate::clock;

/// Lifetime asked for.
const EXPIRES: u32 = 600;
/// Between look-ups of a host that is not registered with.
const LOOK_UP: Duration = Duration::from_secs(300);
/// Between looks whose turn it is to register.
const TURN: Duration = Duration::from_secs(1);
/// How long a host may take to answer OPTIONS.
const ANSWER: Duration = Duration::from_secs(5);
/// How long unregistering may hold up a shutdown.
const UNREGISTER: Duration = Duration::from_secs(2);
/// The same for all trunks, each of which may have been about to register.
pub(super) const WITHDRAWN: Duration = Duration::from_secs(3);

/// A registrar was told of this gateway, and not yet that it is gone.
struct Known<'a>(&'a channel::Sender<usize>);

impl<'a> Known<'a> {
    fn new(registered: &'a channel::Sender<usize>) -> Self {
        registered.send_modify(|count| *count += 1);
        Self(registered)
    }
}

impl Drop for Known<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Keeps the trunk at `index` as it is configured, also when that changes, until the endpoint stops.
pub(super) async fn run(shared: Arc<Shared>, index: usize) {
    let mut settings = shared.settings.watch();
    while !shared.life.stop.is_cancelled() {
        let Some(config) = settings.borrow_and_update().trunk.get(index).cloned() else { return };
        let stop = shared.life.stop.child_token();
        let changed = async {
            let other = |now: &Arc<SipConfig>| now.trunk.get(index).is_none_or(|now| !is_kept_alike(now, &config));
            tokio::select! {
                () = stop.cancelled() => {}
                // The sender is in `shared`.
                _ = settings.wait_for(other) => stop.cancel(),
            }
        };
        let watched = async {
            if config.options_s > 0 {
                watch(&shared, index, &config, &stop).await;
            }
        };
        tokio::join!(changed, keep(&shared, index, &config, &stop), watched);
    }
}

/// Whether two states of a trunk differ in nothing that its registration and the health of its hosts depend on.
fn is_kept_alike(one: &TrunkConfig, other: &TrunkConfig) -> bool {
    let password = |trunk: &TrunkConfig| trunk.password.as_ref().map(|password| password.reveal().to_owned());
    one.name == other.name
        && one.hosts().eq(other.hosts())
        && (one.failed_target_s, one.options_s, one.keep_alive_s)
            == (other.failed_target_s, other.options_s, other.keep_alive_s)
        && (one.transport, one.register) == (other.transport, other.register)
        && (&one.username, &one.realm) == (&other.username, &other.realm)
        && password(one) == password(other)
}

/// Keeps the trunk at `index` until `stop`.
async fn keep(shared: &Arc<Shared>, index: usize, config: &TrunkConfig, stop: &CancellationToken) {
    if config.name.is_empty() {
        // It was removed.
        return stop.cancelled().await;
    }
    let mut registration = Registration::new(shared.stack.clone(), credential(config));
    let mut failures = 0;
    let mut losses = Losses::default();
    let mut said: Option<Known<'_>> = None;
    // Whether the registrar has it, by its latest answer.
    let mut there = false;
    // Which of the registrar's addresses has it.
    let mut at: Option<SipAddr> = None;
    loop {
        // Both gateways are known by one address: the registration is kept by the one that takes the calls.
        tokio::select! {
            () = stop.cancelled() => break,
            () = shared.beside.place.until(true) => {}
        }
        let ours = shared.registers(&config.name);
        if config.register && !ours {
            // Another gateway does, or will in a moment, or this one drains: before anything else, what this one had there goes, so
            // that not both ring.
            if let Some(known) = said.take() {
                info!(trunk = config.name, "this gateway is registered no longer");
                timeout(UNREGISTER, register(shared, config, &mut registration, None, &mut at, 0)).await.ok();
                drop(known);
            }
            shared.trunk_state(index, |s| (s.registered, s.error) = (None, None));
        }
        let mut known = None;
        for (name, ..) in config.hosts() {
            let addresses = look_up(&name).await;
            known = known.or(addresses.first().copied());
            if let Ok(host) = HostWithPort::try_from(name.as_str()) {
                addresses.iter().for_each(|address| shared.trunks.carriers.found(&host.host, *address));
            }
        }
        let wait = if config.register && ours {
            said.get_or_insert_with(|| Known::new(&shared.life.registered));
            let registered = tokio::select! {
                // Nothing is said to the registrar behind the end of the lease.
                biased;
                () = changed(shared, config, true) => continue,
                registered = register(shared, config, &mut registration, known, &mut at, EXPIRES) => registered,
            };
            match registered {
                Ok(expires) => {
                    if failures > 0 || shared.trunk_state(index, |s| s.registered) == Some(Some(false)) {
                        info!(trunk = config.name, expires, "registered");
                    }
                    (failures, there) = (0, true);
                    shared.trunk_state(index, |s| {
                        s.registered = Some(true);
                        s.error = None;
                    });
                    refresh_interval(expires)
                }
                Err(error) => {
                    there = false;
                    warn!(trunk = config.name, error, "registration failed");
                    shared.trunk_state(index, |s| {
                        s.registered = Some(false);
                        s.error = Some(error);
                    });
                    failures += 1;
                    backoff_interval(failures)
                }
            }
        } else {
            LOOK_UP
        };
        show(shared, config, index);
        let (since, registered) = (clock::now(), config.register && ours && failures == 0);
        let gone = tokio::select! {
            () = stop.cancelled() => break,
            () = sleep(wait) => None,
            why = flow::lost(shared, config, at.as_ref()), if registered => Some(why),
            () = changed(shared, config, ours), if config.register => None,
            () = shared.beside.place.until(false) => None,
        };
        if let Some(why) = gone {
            let wait = losses.lost(clock::now().saturating_duration_since(since));
            info!(trunk = config.name, why, ?wait, "the way from the registrar is gone; it is registered with anew");
            counter!("antiphon_trunk_flows_lost_total").increment(1);
            tokio::select! {
                () = stop.cancelled() => break,
                () = sleep(wait) => {}
            }
        }
    }
    // Where another gateway has taken this one's place, the registration is that one's.
    if said.is_some() && there && shared.beside.place.is_held() {
        timeout(UNREGISTER, register(shared, config, &mut registration, None, &mut at, 0)).await.ok();
    }
}

/// Returns when it is another gateway's turn to register, or this one's, or this one drains.
async fn changed(shared: &Shared, config: &TrunkConfig, ours: bool) {
    let mut leaving = shared.life.leaving.subscribe();
    while shared.registers(&config.name) == ours {
        tokio::select! {
            () = sleep(TURN) => {}
            // The sender is in `shared`.
            _ = leaving.changed() => {}
        }
    }
}

/// Asks every host of the trunk at `index` whether it lives, until `stop`.
async fn watch(shared: &Shared, index: usize, config: &TrunkConfig, stop: &CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = shared.beside.place.until(true) => {}
        }
        let hosts: Vec<String> = config.hosts().map(|(host, ..)| host).collect();
        let asked = hosts.iter().map(|host| ask(shared, config, host));
        let answers = tokio::select! {
            () = stop.cancelled() => return,
            answers = join_all(asked) => answers,
        };
        for (host, answer) in hosts.iter().zip(answers) {
            counter!("antiphon_trunk_checks_total", "outcome" => if answer.is_ok() { "answered" } else { "failed" })
                .increment(1);
            let error = answer.as_ref().err().cloned().unwrap_or_default();
            match shared.trunk_state(index, |s| s.targets.checked(host, answer)).flatten() {
                Some(true) => info!(trunk = config.name, host, "the host of a trunk answers"),
                Some(false) => warn!(trunk = config.name, host, error, "the host of a trunk is down"),
                None => {}
            }
        }
        show(shared, config, index);
        // A host that is slow to answer is not asked twice at a time.
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(Duration::from_secs(config.options_s)) => {}
        }
    }
}

/// Whether a host lives: one of its addresses does. Those that do not are tried last by the next call.
async fn ask(shared: &Shared, config: &TrunkConfig, host: &str) -> Result<(), String> {
    let found = shared.trunks.routes.of(&flow::host_uri(config, host)?, config.transport, clock::now()).await;
    if found.is_empty() {
        return ask_at(shared, config, host, None).await;
    }
    let answers = join_all(found.iter().map(|address| ask_at(shared, config, host, Some(address)))).await;
    let mut all = Err("no answer to OPTIONS".to_owned());
    for (address, answer) in found.iter().zip(answers) {
        match &answer {
            Ok(()) => shared.trunks.routes.worked(address),
            Err(_) => {
                let wait = Duration::from_secs(config.failed_target_s.max(config.options_s + 1));
                shared.trunks.routes.failed(clock::now(), address, wait);
            }
        }
        if all.is_err() {
            all = answer;
        }
    }
    all
}

/// Every answer shows life but 503, which says that no calls are taken, and 408, by which the stack and proxies say that there
/// was none.
async fn ask_at(shared: &Shared, config: &TrunkConfig, host: &str, at: Option<&SipAddr>) -> Result<(), String> {
    let answer = timeout(ANSWER, flow::probe(shared, config, host, at)).await;
    match answer.unwrap_or_else(|_| Err("no answer to OPTIONS".to_owned()))? {
        status @ (408 | 503) => Err(format!("{} to OPTIONS", StatusCode::from(status))),
        _ => Ok(()),
    }
}

/// Shows the state of a trunk as a metric.
fn show(shared: &Shared, config: &TrunkConfig, index: usize) {
    let usable = shared.trunk_state(index, |s| s.is_usable()).unwrap_or_default();
    gauge!("antiphon_trunk_up", "trunk" => config.name.clone()).set(f64::from(u8::from(usable)));
}

/// Registers, or with `expires` 0 no longer. `at`: which of the registrar's addresses has it; the others are asked where that
/// one fails.
async fn register(
    shared: &Shared,
    config: &TrunkConfig,
    registration: &mut Registration,
    peer: Option<IpAddr>,
    at: &mut Option<SipAddr>,
    expires: u32,
) -> Result<u32, String> {
    let server = registrar(config).map_err(|e| e.to_string())?;
    // No other address is looked up to sign off at.
    let mut found: VecDeque<SipAddr> = match expires {
        0 => at.iter().cloned().collect(),
        _ => shared.trunks.routes.of(&server, config.transport, clock::now()).await.into(),
    };
    if let Some(before) = at.as_ref().filter(|before| found.contains(before)).cloned() {
        found.retain(|address| *address != before);
        found.push_front(before);
    }
    loop {
        *at = found.pop_front();
        let asked =
            names::pinned(&server, at.as_ref(), register_at(shared, config, registration, peer, at.as_ref(), expires));
        let answer = match found.is_empty() {
            true => asked.await,
            false => timeout(ANSWER, asked).await.unwrap_or_else(|_| Err((true, "no answer to REGISTER".to_owned()))),
        };
        match (answer, at.as_ref()) {
            (Ok(granted), address) => {
                address.iter().for_each(|address| shared.trunks.routes.worked(address));
                return Ok(granted);
            }
            (Err((true, error)), Some(address)) => {
                shared.trunks.routes.failed(clock::now(), address, Duration::from_secs(config.failed_target_s));
                if found.is_empty() {
                    return Err(error);
                }
                info!(trunk = config.name, %address, error, "the registrar's next address is asked");
            }
            (Err((_, error)), _) => return Err(error),
        }
    }
}

/// Registers at one address. The error says whether another one may do better.
async fn register_at(
    shared: &Shared,
    config: &TrunkConfig,
    registration: &mut Registration,
    peer: Option<IpAddr>,
    at: Option<&SipAddr>,
    expires: u32,
) -> Result<u32, (bool, String)> {
    let server = registrar(config).map_err(|e| (false, e.to_string()))?;
    let ip = at.and_then(|at| at.get_socketaddr().ok()).map(|address| address.ip());
    if let Some(ip) = ip {
        // What comes from there is the trunk's.
        shared.trunks.carriers.found(&server.host_with_port.host, ip);
    }
    if registration.contact.is_none() {
        let by = at.and_then(|at| at.r#type).unwrap_or_else(|| wire(config));
        let uri = shared.contact(config.username.as_deref(), by, ip.or(peer));
        registration.contact = Some(typed::Contact { display_name: None, uri, params: vec![] });
    }
    let response = registration.register(server, Some(expires)).await.map_err(|e| (true, e.to_string()))?;
    match response.status_code.kind() {
        StatusCodeKind::Successful => Ok(registration.expires()),
        _ => {
            let code = response.status_code.code();
            Err((code == 408 || (500..600).contains(&code), format!("{code} {}", response.status_code.text())))
        }
    }
}
