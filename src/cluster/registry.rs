//! The exchange with Redis: this node's word out, those of the others in, and leases.

use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use tokio::sync::watch;

use super::lease::LEASE;
use super::rounds::{Link, Rounds, millis};
use super::view::{Peer, TTL};
use super::{Nodes, Told, voices};
use crate::clock;

/// Names of one cluster; the braces keep them in one slot of a Redis that is a cluster itself.
pub(super) const PREFIX: &str = "{antiphon}";

/// Writes a node, forgets those that were not written for a lifetime, and gives all that are there, by Redis' own clock:
/// those of the nodes may differ. The index has no meaning of its own, what it names counts only while its key lives. A
/// name that another process holds is not taken from it, unless it has lent its place.
///
/// Keys: index, this node. Arguments: its name, its word, the lifetime in ms, its instance, prefix of nodes' keys.
pub(super) const SPEAK: &str = r"
local told = redis.call('GET', KEYS[2])
if told then
  local holder = cjson.decode(told)['instance']
  if holder ~= ARGV[4] and holder ~= '' then return {'taken'} end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[3] * 2)
local all = {'ok'}
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local word = redis.call('GET', ARGV[5] .. name)
  if word then all[#all + 1] = word end
end
return all";

/// Gives the words of all that are there, of nodes or of workers.
///
/// Keys: index. Arguments: prefix of their keys.
pub(super) const LIST: &str = r"
local all = {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local word = redis.call('GET', ARGV[1] .. name)
  if word then all[#all + 1] = word end
end
return all";

/// Removes a node that ends, and what it holds.
///
/// Keys: index, this node, its leases. Arguments: its name, its instance.
pub(super) const LEAVE: &str = r"
local told = redis.call('GET', KEYS[2])
if told and cjson.decode(told)['instance'] == ARGV[2] then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[1], ARGV[1])
end
for lease = 3, #KEYS do
  if redis.call('GET', KEYS[lease]) == ARGV[2] then redis.call('DEL', KEYS[lease]) end
end
return 0";

/// Lets another process go by the name of a node, whose word others read until that one says its own: a node that is gone for a
/// second is one whose calls are not found. Its leases are free.
///
/// Keys and arguments: as of leaving, and the lifetime in ms.
const LEND: &str = r"
local told = redis.call('GET', KEYS[2])
if told and cjson.decode(told)['instance'] == ARGV[2] then
  local from, to = string.find(told, ARGV[2], 1, true)
  redis.call('SET', KEYS[2], string.sub(told, 1, from - 1) .. string.sub(told, to + 1), 'PX', ARGV[3])
end
for lease = 3, #KEYS do
  if redis.call('GET', KEYS[lease]) == ARGV[2] then redis.call('DEL', KEYS[lease]) end
end
return 0";

/// Takes or renews a lease; gives the number of the holding, or -1 where another has it or it may not be taken yet. A Redis
/// that has lost its memory does not know whether there is a holder: it begins at the time of day, which is greater than all
/// numbers before, and leaves who holds the lease by its own clock the time to say so.
///
/// Keys: lease, counter, quiet. Arguments: instance, the lifetime in ms, that of the counter, the number of the own holding
/// or 0, whether it may be taken (1).
const HOLD: &str = r"
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return -1 end
local own, fence = tonumber(ARGV[4]), tonumber(redis.call('GET', KEYS[2]) or 0)
if fence == 0 then
  local time = redis.call('TIME')
  fence = math.max(own, time[1] * 1000 + math.floor(time[2] / 1000))
  redis.call('SET', KEYS[2], string.format('%.0f', fence))
  redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
end
if own ~= fence then
  local quiet = redis.call('EXISTS', KEYS[3]) == 1
  if quiet and own == 0 or not quiet and ARGV[5] ~= '1' then return -1 end
  fence = redis.call('INCR', KEYS[2])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return fence";

/// Gives a lease back, where it is this process's.
///
/// Keys: lease. Arguments: instance.
const RELEASE: &str = r"
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0";

/// A number that was forgotten would begin anew: no holder sleeps for so long.
const COUNTER: Duration = Duration::from_secs(30 * 86_400);

/// How long another node may take to say whether it can use the registry.
const ASKED: Duration = Duration::from_secs(1);

/// Runs until `stop`; then `ends` says whether the node does, or another process takes its place.
pub(super) async fn keep(
    nodes: &Nodes,
    tell: impl Fn() -> Told + Send,
    trunks: Vec<String>,
    stop: watch::Receiver<bool>,
    ends: impl Fn() -> bool + Send,
) {
    let (mut link, mut written) = (Link::new(nodes.0.redis.clone()), None);
    let mut rounds = Rounds::new(stop);
    while rounds.next().await {
        let said = link.exchange(|connection| round(nodes, connection, &mut written, &tell, &trunks)).await;
        let (reached, now) = (said.is_ok(), clock::now());
        nodes.lock().leases.reached(now, reached);
        told(nodes, said.err());
        if !reached && nodes.lock().leases.any(now) && no_gateway_reaches_it(nodes).await {
            nodes.lock().leases.alone(now);
        }
    }
    let mut leave = redis::cmd("EVAL");
    leave.arg(if ends() { LEAVE } else { LEND }).arg(2 + trunks.len()).arg(index()).arg(key(nodes.name().as_str()));
    trunks.iter().for_each(|trunk| {
        leave.arg(lease(trunk));
    });
    leave.arg(nodes.name().as_str()).arg(&nodes.0.instance).arg(millis(TTL));
    if !link.leave(&leave).await {
        tracing::info!("the registry was not told of the end");
    }
}

/// Reads which others there are, and says nothing.
pub(super) async fn look(nodes: &Nodes) {
    let mut link = Link::new(nodes.0.redis.clone());
    let looked = link.exchange(async |mut connection| {
        let mut list = redis::cmd("EVAL");
        list.arg(LIST).arg(1).arg(index()).arg(key(""));
        let words: Vec<String> = list.query_async(&mut connection).await.map_err(|error| error.to_string())?;
        heard(nodes, &words);
        voices::read(nodes, &mut connection).await.map_err(|error| error.to_string())
    });
    if let Err(error) = looked.await {
        tracing::warn!(error, "the registry of nodes cannot be read; this one begins alone");
    }
}

/// Keeps what others say of themselves. A node of another version may say what is not understood: it is not there for this one.
fn heard(nodes: &Nodes, words: &[String]) {
    let peers = words.iter().filter_map(|word| serde_json::from_str(word).ok()).collect();
    nodes.lock().view.heard(clock::now(), nodes.name(), peers);
}

/// What another node says of itself, as far as it is looked at here.
#[derive(serde::Deserialize)]
struct Ready {
    cluster: Option<Registry>,
}

#[derive(serde::Deserialize)]
struct Registry {
    error: Option<String>,
}

/// Whether every other node that was in the registry says that it cannot use it either. One that does not answer may be able to.
async fn no_gateway_reaches_it(nodes: &Nodes) -> bool {
    let asked = nodes.others().into_iter().map(|peer| async move {
        let request = nodes.request(&peer, reqwest::Method::GET, "/readyz", None, None).ok()?;
        // One that is full says so by its status, and the rest all the same.
        let said: Ready = request.timeout(ASKED).send().await.ok()?.json().await.ok()?;
        said.cluster?.error
    });
    join_all(asked).await.iter().all(Option::is_some)
}

async fn round(
    nodes: &Nodes,
    mut connection: MultiplexedConnection,
    written: &mut Option<String>,
    tell: &(impl Fn() -> Told + Send),
    trunks: &[String],
) -> Result<(), String> {
    let in_redis = |error: redis::RedisError| error.to_string();
    let connection = &mut connection;
    let Told { sip, load, voices, withdrawn } = tell();
    let list = voices::told(voices);
    // Before the word that names it.
    voices::write(connection, nodes.name(), &list, written).await.map_err(in_redis)?;
    let peer = Peer {
        name: nodes.name().clone(),
        instance: nodes.0.instance.clone(),
        advertise: nodes.0.advertise.clone(),
        sip,
        load,
        voices: Some(list.0),
    };
    let word = serde_json::to_string(&peer).map_err(|error| error.to_string())?;
    let mut speak = redis::cmd("EVAL");
    speak.arg(SPEAK).arg(2).arg(index()).arg(key(nodes.name().as_str()));
    speak.arg(nodes.name().as_str()).arg(word).arg(millis(TTL)).arg(&nodes.0.instance).arg(key(""));
    let answer: Vec<String> = speak.query_async(connection).await.map_err(in_redis)?;
    let Some(("ok", words)) = answer.split_first().map(|(first, words)| (first.as_str(), words)) else {
        return Err(format!("another gateway goes by the name `{}`: [cluster] node must be unique", nodes.name()));
    };
    heard(nodes, words);
    voices::read(nodes, connection).await.map_err(in_redis)?;
    for trunk in trunks {
        // Redis counts from later on.
        let asked = clock::now();
        if withdrawn {
            // Before Redis lets another have it.
            nodes.lock().leases.answered(asked, trunk, None);
            let mut release = redis::cmd("EVAL");
            release.arg(RELEASE).arg(1).arg(lease(trunk)).arg(&nodes.0.instance);
            release.query_async::<i64>(connection).await.map_err(in_redis)?;
            continue;
        }
        let (own, may_take) = {
            let leases = &nodes.lock().leases;
            (leases.fence(asked, trunk), leases.may_take(asked))
        };
        let mut hold = redis::cmd("EVAL");
        hold.arg(HOLD).arg(3).arg(lease(trunk)).arg(format!("{PREFIX}:fence:{trunk}"));
        hold.arg(format!("{PREFIX}:quiet:{trunk}")).arg(&nodes.0.instance).arg(millis(LEASE)).arg(millis(COUNTER));
        hold.arg(own.unwrap_or_default()).arg(u8::from(may_take));
        let fence: i64 = hold.query_async(connection).await.map_err(in_redis)?;
        let fence = (fence >= 0).then_some(fence);
        if nodes.lock().leases.answered(asked, trunk, fence) {
            tracing::info!(trunk, ?fence, ours = fence.is_some(), "who registers at a trunk has changed");
        }
    }
    Ok(())
}

/// Says how it went, where that is new.
fn told(nodes: &Nodes, error: Option<String>) {
    let mut state = nodes.lock();
    let before = std::mem::replace(&mut state.error, error.clone());
    let others = state.view.live().count();
    drop(state);
    metrics::gauge!("antiphon_registry_up").set(f64::from(u8::from(error.is_none())));
    metrics::gauge!("antiphon_cluster_nodes").set(others as f64 + 1.0);
    match (&before, &error) {
        (None, Some(error)) => tracing::error!(error, "the registry of nodes cannot be used; this one goes on alone"),
        (Some(_), None) => tracing::info!(others, "the registry of nodes can be used again"),
        _ => {}
    }
}

fn index() -> String {
    format!("{PREFIX}:nodes")
}

fn key(node: &str) -> String {
    format!("{PREFIX}:node:{node}")
}

fn lease(trunk: &str) -> String {
    format!("{PREFIX}:trunk:{trunk}")
}
