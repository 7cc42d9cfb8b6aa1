//! The name of a machine among others, and ids that carry it.
//!
//! # Why
//! A gateway can tell from an id whose object it is, without asking another: a request that a balancer gave to the wrong
//! machine is passed on at once, and no table of all calls has to be kept, nor can one be out of date.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

/// Longest name, characters.
const MAX: usize = 32;
/// Between the name and the rest of an id.
const DOT: char = '.';

/// Name of a node: small letters, digits and `-`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeName(Arc<str>);

impl NodeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The node that an id was made by; `None`: a machine that is alone, or it is no id of ours.
    pub fn of(id: &str) -> Option<Self> {
        let (name, rest) = id.split_once(DOT)?;
        if rest.is_empty() { None } else { name.parse().ok() }
    }
}

/// A new random id, of `node` where there is one.
pub fn fresh_id(node: Option<&NodeName>) -> String {
    let random = uuid::Uuid::new_v4().simple();
    match node {
        Some(node) => format!("{node}{DOT}{random}"),
        None => random.to_string(),
    }
}

impl std::str::FromStr for NodeName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > MAX || !name.chars().all(allowed) {
            return Err(format!("`{name}` is no name of a node: 1 to {MAX} small letters, digits and `-`"));
        }
        Ok(Self(name.into()))
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for NodeName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for NodeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_its_node_and_others_name_none() {
        let name: NodeName = "gw-1".parse().expect("a name");
        let id = fresh_id(Some(&name));
        assert_eq!(NodeName::of(&id), Some(name));
        assert_eq!(id.len(), "gw-1.".len() + 32);
        for other in [fresh_id(None).as_str(), "", ".", "a.", ".b", "..", "A.b", "a b.c", "gw_1.b"] {
            assert_eq!(NodeName::of(other), None, "{other}");
        }
    }

    #[test]
    fn a_name_is_safe_in_urls_and_keys() {
        for wrong in ["", "A", "a.b", "a/b", "a b", "ä", &"a".repeat(33)] {
            assert!(wrong.parse::<NodeName>().is_err(), "{wrong}");
        }
    }
}
