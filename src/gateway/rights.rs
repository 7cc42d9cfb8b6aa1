//! Whose an enrolled voice is, and who may have it speak.
//!
//! # Why
//! A voice is somebody's: it was enrolled with their consent, for the tenant that did so. Whatever names one (a request, a job, a
//! frame of an agent) is asked here for whom it does, so that no tenant speaks with a voice of another.

use std::sync::Arc;

use super::tenants::Tenants;
use crate::cluster::Nodes;
use crate::voice::api::Service;
use crate::voice::copies;

/// What decides it. Clones mean the same.
#[derive(Clone)]
pub struct Rights {
    pub(super) voices: Arc<Service>,
    pub(super) tenants: Tenants,
    pub(super) nodes: Option<Nodes>,
}

impl Rights {
    /// Of the parts of a gateway.
    pub fn new(voices: Arc<Service>, tenants: Tenants, nodes: Option<Nodes>) -> Self {
        Self { voices, tenants, nodes }
    }

    /// Whose the voice of this name is that would speak here: one of this node, or else of another; `None`: everybody's.
    pub fn owner_of(&self, name: &str) -> Option<String> {
        if self.voices.knows(name) {
            return self.voices.owner(name);
        }
        self.nodes.as_ref()?.voice(name)?.1.owner
    }

    /// Whether an agent on a call of `tenant` may name this voice. Calls without a tenant are the operator's, whose all
    /// voices are.
    pub fn may_name(&self, tenant: &str, name: &str) -> bool {
        // Copies of other machines' voices are spoken by their names, which say whose they are.
        if copies::is_content(name) || copies::parts(name).is_some() {
            return false;
        }
        match self.owner_of(name) {
            Some(owner) => tenant.is_empty() || *owner == *tenant,
            None => self.tenants.may_speak_as(tenant, name),
        }
    }
}
