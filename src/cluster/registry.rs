//! The exchange with Redis: this node's word out, those of the others in, and leases.

use std::time::Duration;

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::lease::LEASE;
use super::view::{Peer, TTL};
use super::{Nodes, Told, voices};
use crate::clock;

/// How often a node speaks and listens.
pub(super) const ROUND: Duration = Duration::from_secs(1);
/// Longest wait for one answer of Redis.
const ANSWER: Duration = Duration::from_secs(1);
/// Longest wait for a round: a connection, a word and a few leases.
pub(super) const LIMIT: Duration = Duration::from_secs(3);
/// Names of one cluster; the braces keep them in one slot of a Redis that is a cluster itself.
pub(super) const PREFIX: &str = "{antiphon}";

/// Writes a node, forgets those that were not written for a lifetime, and gives all that are there, by Redis' own clock:
/// those of the nodes may differ. The index has no meaning of its own, what it names counts only while its key lives. A
/// name that another process holds is not taken from it.
///
/// Keys: index, this node. Arguments: its name, its word, the lifetime in ms, its instance, prefix of nodes' keys.
pub(super) const SPEAK: &str = r"
local told = redis.call('GET', KEYS[2])
if told and cjson.decode(told)['instance'] ~= ARGV[4] then return {'taken'} end
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

/// Takes or renews a lease; gives the number of the holding, or -1 where another has it.
///
/// Keys: lease, counter. Arguments: instance, the lifetime in ms, that of the counter.
const HOLD: &str = r"
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if not holder then redis.call('INCR', KEYS[2]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return tonumber(redis.call('GET', KEYS[2]) or 0)";

/// A number that was forgotten would begin anew: no holder sleeps for so long.
const COUNTER: Duration = Duration::from_secs(30 * 86_400);

/// Runs until `stop`.
pub(super) async fn keep(
    nodes: &Nodes,
    tell: impl Fn() -> Told + Send,
    trunks: Vec<String>,
    mut stop: watch::Receiver<bool>,
) {
    let (mut connection, mut written) = (None, None);
    let mut tick = interval(ROUND);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // Also when the application was dropped without being drained.
            _ = stop.changed() => break,
            _ = tick.tick() => {}
        }
        let round = timeout(LIMIT, round(nodes, &mut connection, &mut written, &tell, &trunks)).await;
        let outcome = round.unwrap_or_else(|_| Err("no answer".to_owned()));
        if outcome.is_err() {
            // Made anew next time: what was half said on it is not waited for.
            connection = None;
        }
        told(nodes, outcome.err());
    }
    // A node that ends need not be waited for; one that is killed expires.
    if let Some(connection) = &mut connection {
        let mut leave = redis::cmd("EVAL");
        leave.arg(LEAVE).arg(2 + trunks.len()).arg(index()).arg(key(nodes.name().as_str()));
        trunks.iter().for_each(|trunk| {
            leave.arg(lease(trunk));
        });
        leave.arg(nodes.name().as_str()).arg(&nodes.0.instance);
        let left: Result<Result<i64, _>, _> = timeout(ANSWER, leave.query_async(connection)).await;
        if !matches!(left, Ok(Ok(_))) {
            tracing::info!("the registry was not told of the end");
        }
    }
}

async fn round(
    nodes: &Nodes,
    connection: &mut Option<MultiplexedConnection>,
    written: &mut Option<String>,
    tell: &(impl Fn() -> Told + Send),
    trunks: &[String],
) -> Result<(), String> {
    let in_redis = |error: redis::RedisError| error.to_string();
    let connection = connected(&nodes.0.redis, connection).await?;
    let Told { sip, load, voices } = tell();
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
    // A node of another version may say what is not understood: it is not there for this one.
    let peers = words.iter().filter_map(|word| serde_json::from_str(word).ok()).collect();
    nodes.lock().view.heard(clock::now(), nodes.name(), peers);
    voices::read(nodes, connection).await.map_err(in_redis)?;
    for trunk in trunks {
        let mut hold = redis::cmd("EVAL");
        hold.arg(HOLD).arg(2).arg(lease(trunk)).arg(format!("{PREFIX}:fence:{trunk}"));
        hold.arg(&nodes.0.instance).arg(millis(LEASE)).arg(millis(COUNTER));
        let fence: i64 = hold.query_async(connection).await.map_err(in_redis)?;
        let fence = (fence >= 0).then_some(fence);
        if nodes.lock().leases.answered(trunk, fence) {
            tracing::info!(trunk, ?fence, ours = fence.is_some(), "who registers at a trunk has changed");
        }
    }
    Ok(())
}

/// The connection, made where there is none.
pub(super) async fn connected<'a>(
    redis: &redis::Client,
    connection: &'a mut Option<MultiplexedConnection>,
) -> Result<&'a mut MultiplexedConnection, String> {
    match connection {
        Some(connection) => Ok(connection),
        None => {
            let config = AsyncConnectionConfig::new();
            let config = config.set_connection_timeout(Some(ANSWER)).set_response_timeout(Some(ANSWER));
            let made = redis.get_multiplexed_async_connection_with_config(&config).await;
            Ok(connection.insert(made.map_err(|error| error.to_string())?))
        }
    }
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

pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
