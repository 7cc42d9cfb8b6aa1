//! `[tenant.<name>]`, brought to the parts that hold to it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Config;
use crate::gateway::tenants::{Limits, Rules};
use crate::sched;
use crate::server::config::{Scope, Token};

/// A customer of this gateway: who they are, what they may use and how much.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tenant {
    /// A request with one of these is of this tenant. Without scopes it may do everything with calls and speech, and
    /// nothing else.
    pub tokens: Vec<Token>,
    /// Agents that are theirs: calls that come in for these are theirs, and no other tenant names them.
    pub agents: Vec<String>,
    /// Trunks that their calls may go out through; empty: all.
    pub trunks: Vec<String>,
    /// Voices that they may name beside their own; empty: all that belong to no tenant.
    pub voices: Vec<String>,
    /// How much.
    pub limits: Limits,
    /// Their share of a device, relative to others, when there is not enough for all.
    pub share: f64,
}

impl Default for Tenant {
    fn default() -> Self {
        let (tokens, lists) = (Vec::new(), Vec::new);
        Self { tokens, agents: lists(), trunks: lists(), voices: lists(), limits: Limits::default(), share: 1.0 }
    }
}

impl Config {
    /// Gives each tenant's tokens, agents and shares to the sections that they belong to.
    ///
    /// # Errors
    /// A name that is not there, or belongs to two.
    pub(super) fn settle_tenants(&mut self) -> Result<(), String> {
        for (name, tenant) in &self.tenant {
            let at = |key: &str, problem: String| Err(format!("[tenant.{name}] {key}: {problem}"));
            if name.is_empty() {
                return Err("[tenant.\"\"]: a tenant needs a name".into());
            }
            for token in &tenant.tokens {
                if !token.name.is_empty() && token.name != *name {
                    return at(
                        "tokens",
                        format!("a token is called `{}`; those of a tenant bear its name", token.name),
                    );
                }
                if token.scopes.iter().any(|scope| matches!(scope, Scope::Admin | Scope::Metrics)) {
                    return at(
                        "tokens",
                        "the scopes `admin` and `metrics` are the operator's: put that token into [http]".into(),
                    );
                }
                let scopes = match token.scopes.is_empty() {
                    true => vec![Scope::Calls, Scope::Speech],
                    false => token.scopes.clone(),
                };
                self.http.tokens.push(token.of(name, scopes));
            }
            for agent in &tenant.agents {
                let Some(found) = self.agent.get_mut(agent) else {
                    return at("agents", format!("there is no [agent.{agent}]"));
                };
                if let Some(owner) = found.tenant.replace(name.clone()).filter(|owner| owner != name) {
                    return at("agents", format!("`{agent}` belongs to `{owner}` already"));
                }
            }
            if let Some(trunk) =
                tenant.trunks.iter().find(|wanted| self.sip.trunk.iter().all(|trunk| trunk.name != **wanted))
            {
                return at("trunks", format!("there is no [[sip.trunk]] `{trunk}`"));
            }
            let limits = sched::Tenant {
                weight: tenant.share,
                chars_per_minute: tenant.limits.chars_per_minute,
                max_live: tenant.limits.streams,
            };
            if self.scheduler.tenants.insert(name.clone(), limits).is_some() {
                return Err(format!("[scheduler] tenants: `{name}` is limited by [tenant.{name}]: remove it here"));
            }
        }
        Ok(())
    }

    /// What the gateway itself holds each tenant to.
    pub fn tenant_rules(&self) -> BTreeMap<String, Rules> {
        let rules = |tenant: &Tenant| Rules {
            trunks: tenant.trunks.clone(),
            voices: tenant.voices.clone(),
            limits: tenant.limits.clone(),
        };
        self.tenant.iter().map(|(name, tenant)| (name.clone(), rules(tenant))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("gateway.toml");
        std::fs::write(&file, text).expect("written");
        Config::load(Some(&file), []).map_err(|error| error.message)
    }

    #[test]
    fn a_tenants_tokens_agents_and_shares_go_where_they_are_kept() {
        let config = read(
            "[tenant.crm]\ntokens = ['a-token-of-the-crm-itself']\nagents = ['support']\nshare = 2.0\n\
             limits = { calls = 3, streams = 5 }\n[agent.support]\nurl = 'builtin:demo'\n",
        )
        .expect("valid");
        let token = &config.http.tokens[0];
        assert_eq!((token.name.as_str(), &*token.scopes), ("crm", &[Scope::Calls, Scope::Speech][..]));
        assert_eq!(config.agent["support"].tenant.as_deref(), Some("crm"));
        let limits = &config.scheduler.tenants["crm"];
        assert_eq!((limits.weight, limits.max_live), (2.0, 5));
        assert_eq!(config.tenant_rules()["crm"].limits.calls, 3);
    }

    #[test]
    fn what_is_not_there_or_anothers_is_refused() {
        let agents = "[agent.a]\nurl = 'builtin:demo'\n[tenant.one]\nagents = ['a']\n";
        for (text, expected) in [
            ("[tenant.crm]\nagents = ['nobody']".to_owned(), "no [agent.nobody]"),
            (format!("{agents}[tenant.two]\nagents = ['a']"), "belongs to `one` already"),
            ("[tenant.crm]\ntrunks = ['nowhere']".to_owned(), "no [[sip.trunk]] `nowhere`"),
            ("[tenant.crm]\nshare = 0.0".to_owned(), "weight of crm"),
            ("[tenant.crm]\n[scheduler.tenants.crm]\nweight = 2.0".to_owned(), "remove it here"),
            (
                "[tenant.crm]\ntokens = [{ token = 'a-token-of-the-crm-itself', scopes = ['admin'] }]".to_owned(),
                "the operator's",
            ),
            (
                "[tenant.crm]\ntokens = [{ name = 'erp', token = 'a-token-of-the-crm-itself' }]".to_owned(),
                "bear its name",
            ),
        ] {
            let error = read(&text).expect_err(&text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
