//! Another `[sip]` while calls go on: what of it counts at once, and what waits for a restart.
//!
//! A trunk keeps its place in the list for as long as the endpoint lives, because calls name it by that: one that is new comes
//! behind the others, and one that is gone leaves a place without a name. Calls that are up go on as they began.

use std::sync::Arc;

use metrics::gauge;

use super::{
    SipConfig, SipError, TrunkConfig, dialplan,
    shared::{Shared, State, lock},
    trunk,
};

/// Whether it can work, beyond what single values say.
pub(super) fn check(config: &SipConfig) -> Result<(), SipError> {
    for (n, trunk) in config.trunk.iter().enumerate() {
        let wrong = |what: &str| Err(SipError::Config(format!("[[sip.trunk]] `{}`: {what}", trunk.name)));
        if trunk.name.is_empty() {
            return wrong("it needs a name");
        }
        if let Some((host, ..)) = trunk.hosts().find(|(host, ..)| dialplan::at(trunk, host, "x").is_err()) {
            return wrong(&format!("host `{host}` is no host or address"));
        }
        if config.trunk[..n].iter().any(|t| t.name == trunk.name) {
            return Err(SipError::Config(format!("two [[sip.trunk]] are named `{}`", trunk.name)));
        }
        if trunk.register && (trunk.username.is_none() || trunk.password.is_none()) {
            return wrong("register needs username and password");
        }
    }
    Ok(())
}

/// Takes up what can change, and names the keys that changed and cannot.
pub(super) fn apply(shared: &Arc<Shared>, wanted: &SipConfig) -> Vec<String> {
    let before = shared.config();
    let mut waits = Vec::new();
    let mut next = SipConfig { trunk: Vec::new(), ..wanted.clone() };
    keep_what_is_bound(&before, &mut next);
    let has_roots = before.tls_roots.is_some() || before.trunk.iter().any(|trunk| trunk.transport.may_be_tls());
    let wanted_trunk = |name: &str| wanted.trunk.iter().find(|trunk| trunk.name == name && !name.is_empty());
    next.trunk.extend(before.trunk.iter().map(|old| wanted_trunk(&old.name).cloned().unwrap_or_else(|| gone(old))));
    let is_new = |trunk: &&TrunkConfig| before.trunk.iter().all(|old| old.name != trunk.name);
    next.trunk.extend(wanted.trunk.iter().filter(is_new).cloned());
    // Whom to trust is read at the start.
    for (trunk, old) in next.trunk.iter_mut().zip(&before.trunk) {
        if trunk.transport.may_be_tls() && !has_roots {
            waits.push(format!("sip.trunk `{}` transport", trunk.name));
            *trunk = old.clone();
        }
    }
    next.trunk.retain(|trunk| {
        let waiting = trunk.transport.may_be_tls() && !has_roots;
        if waiting {
            waits.push(format!("sip.trunk `{}`", trunk.name));
        }
        !waiting
    });
    let trunks = next.trunk.iter().any(|trunk| !trunk.name.is_empty());
    shared.door.apply(&next);
    shared.auth.replace(&next.users);
    shared.places.limit(next.max_calls, next.half_open_per_source, trunks);
    shared.trunks.quotas.limit(next.trunk.iter().map(|trunk| (trunk.name.clone(), trunk.limits())));
    shared.trunks.carriers.apply(&next);
    let mut states = lock(&shared.trunks.states);
    for (index, trunk) in next.trunk.iter().enumerate() {
        match (states.get_mut(index), before.trunk.get(index)) {
            (Some(state), Some(old)) if old.name != trunk.name => {
                // No number: no alert is about a trunk that is none any more.
                gauge!("antiphon_trunk_up", "trunk" => old.name.clone()).set(f64::NAN);
                *state = State::new(trunk);
            }
            (Some(state), Some(old)) => {
                if !old.hosts().eq(trunk.hosts()) || old.options_s != trunk.options_s {
                    *state = State { registered: state.registered, error: state.error.clone(), ..State::new(trunk) };
                }
                if old.register != trunk.register {
                    (state.registered, state.error) = (trunk.register.then_some(false), None);
                }
            }
            (Some(_), None) => {}
            (None, _) => states.push(State::new(trunk)),
        }
    }
    drop(states);
    let new = before.trunk.len()..next.trunk.len();
    shared.settings.set(next);
    for index in new {
        shared.life.tasks.spawn(trunk::run(shared.clone(), index));
    }
    waits
}

/// A trunk that was removed: nothing goes there, nobody comes from there, and nothing is registered.
fn gone(trunk: &TrunkConfig) -> TrunkConfig {
    TrunkConfig {
        name: String::new(),
        register: false,
        refer: false,
        options_s: 0,
        prefixes: Vec::new(),
        targets: Vec::new(),
        username: None,
        password: None,
        transport: Default::default(),
        ..trunk.clone()
    }
}

/// What sockets, names and challenges were made with.
fn keep_what_is_bound(before: &SipConfig, next: &mut SipConfig) {
    let SipConfig { udp, tcp, tls, ws, wss, ws_origins, tls_roots, public_ip, public_ips, .. } = before.clone();
    (next.udp, next.tcp, next.tls, next.ws, next.wss) = (udp, tcp, tls, ws, wss);
    (next.ws_origins, next.tls_roots) = (ws_origins, tls_roots);
    (next.public_ip, next.public_ips) = (public_ip, public_ips);
    let SipConfig { internal_networks, realm, digest, agent, .. } = before.clone();
    (next.internal_networks, next.realm, next.digest, next.agent) = (internal_networks, realm, digest, agent);
}
