//! What of `[http]` may change while the gateway runs: tokens, names and origins.

use std::sync::{Arc, PoisonError, RwLock};

use super::auth::Tokens;
use super::config::Http;
use super::grants::Grants;
use super::guard::Pages;
use crate::cluster::Nodes;

/// One state of it.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) tokens: Tokens,
    pub(super) pages: Pages,
}

/// The state in force, which every request reads once, and the tokens of pages. Clones mean the same.
#[derive(Clone, Debug)]
pub struct Policies {
    policy: Arc<RwLock<Arc<Policy>>>,
    pub(super) grants: Grants,
    /// The gateways that may pass requests on.
    pub(super) nodes: Option<Nodes>,
}

impl Policies {
    /// The rules of a configuration.
    pub fn new(config: &Http) -> Self {
        Self { policy: Arc::new(RwLock::new(Arc::new(Policy::new(config)))), grants: Grants::default(), nodes: None }
    }

    /// As it is, among other gateways.
    #[must_use]
    pub fn among(self, nodes: Option<Nodes>) -> Self {
        Self { nodes, ..self }
    }

    /// Replaces the rules; requests that are under way finish by the old ones.
    pub fn replace(&self, config: &Http) {
        *self.policy.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Policy::new(config));
    }

    pub(super) fn get(&self) -> Arc<Policy> {
        self.policy.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Policy {
    fn new(config: &Http) -> Self {
        Self { tokens: Tokens::new(&config.tokens), pages: Pages::new(config) }
    }
}
