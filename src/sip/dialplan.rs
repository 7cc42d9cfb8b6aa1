//! Where a call may go: from what was asked for to an address and a trunk, or a refusal that names the key.
//!
//! Pure: it reads the configuration and nothing else. Everything that makes a telephone ring asks here: calls of the
//! API, transfers by an agent, and REFER.
//!
//! # Why
//! *Nothing may be called that is not allowed.* Calls cost money, and a stranger who can name a destination (a leaked token,
//! a talked-over agent) names expensive ones. So calls leave through a trunk and to its `prefixes` only, and
//! a trunk is chosen by its prefixes: being the first in the file makes none the default.
//!
//! *A gateway on loopback may call loopback* without a trunk: that is a test bench, and no other machine is reached.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use rsipstack::sip::{Host, HostWithPort, Param, Uri};

use super::{
    DialError,
    config::{Outbound, SipConfig, Transport, TrunkConfig},
};

/// Longest destination.
const MAX_TARGET: usize = 255;

/// An outbound call.
#[derive(Clone, Debug, Default)]
pub struct DialRequest {
    /// `sip:user@host`, or a number or user for `trunk`.
    pub to: String,
    /// Our side, likewise; default: the trunk's user, or `antiphon`.
    pub from: Option<String>,
    /// `[[sip.trunk]]` to use; default: the one whose `prefixes` fit best.
    pub trunk: Option<String>,
    /// Further headers of the INVITE. Those that SIP itself needs are refused.
    pub headers: BTreeMap<String, String>,
    /// How long it may ring; default `[sip] ring_timeout_s`.
    pub timeout: Option<Duration>,
}

/// The rules for calls that go out.
pub(super) struct Dialplan<'a> {
    pub(super) config: &'a SipConfig,
    /// Every listener is on loopback.
    pub(super) local: bool,
}

/// Where a call goes.
#[derive(Debug)]
pub(super) struct Route<'a> {
    pub(super) uri: Uri,
    /// The trunk and its place in the configuration; `None`: straight to a loopback address.
    pub(super) trunk: Option<(usize, &'a TrunkConfig)>,
    /// Number or user, as the trunk is asked for it.
    pub(super) user: String,
}

/// What was asked for.
enum Target {
    Uri(Box<Uri>),
    /// A number or user that a trunk knows.
    User(String),
}

impl<'a> Dialplan<'a> {
    /// Where `to` leads. `from` decides between trunks that fit equally well; `trunk` names one.
    ///
    /// # Errors
    /// `to` is no address, the trunk is unknown, or the call is not allowed.
    pub(super) fn route(&self, to: &str, from: Option<&str>, trunk: Option<&str>) -> Result<Route<'a>, DialError> {
        let target = parse(to)?;
        let trunks = &self.config.trunk;
        let named = match trunk {
            None => None,
            Some(name) => {
                let found = trunks.iter().enumerate().find(|(_, trunk)| trunk.name == name);
                Some(found.ok_or_else(|| DialError::UnknownTrunk(name.to_owned()))?)
            }
        };
        if self.config.outbound == Outbound::Deny {
            return Err(DialError::Denied("[sip] outbound = \"deny\": this gateway places no calls".to_owned()));
        }
        let mut candidates: Vec<_> = match named {
            Some(named) => vec![named],
            None => trunks.iter().enumerate().collect(),
        };
        let user = match target {
            Target::User(user) if trunks.is_empty() => {
                return Err(DialError::Address(format!(
                    "`{user}` is no full SIP URI (sip:user@host), and there is no [[sip.trunk]] to call it through"
                )));
            }
            Target::User(user) => user,
            Target::Uri(uri) => {
                candidates.retain(|(_, trunk)| leads_to(trunk, &uri.host_with_port));
                if candidates.is_empty() {
                    let loopback = matches!(uri.host_with_port.host, Host::IpAddr(ip) if ip.is_loopback());
                    return match named {
                        None if self.local && loopback => {
                            let user = uri.user().unwrap_or_default().to_owned();
                            Ok(Route { uri: *uri, trunk: None, user })
                        }
                        None => Err(DialError::Denied(format!(
                            "`{to}` is at no [[sip.trunk]], and [sip] outbound = \"trunks\" allows nothing else"
                        ))),
                        Some((_, trunk)) => Err(DialError::Denied(format!(
                            "`{to}` is not at the host of [[sip.trunk]] `{}`",
                            trunk.name
                        ))),
                    };
                }
                uri.user().unwrap_or_default().to_owned()
            }
        };
        let number = comparable(&user).ok_or_else(|| {
            DialError::Denied(format!("`{to}` is no number or user that a [[sip.trunk]] is asked for"))
        })?;
        let read = |trunk: &TrunkConfig| trunk.numbers.as_ref().map_or(number.clone(), |n| n.e164(&number));
        let caller = from.map(user_of);
        let best = candidates
            .iter()
            .filter_map(|(index, trunk)| Some((prefix(trunk, &read(trunk))?, *index, *trunk)))
            // Of equals the first; `max_by_key` would take the last.
            .rev()
            .max_by_key(|(length, _, trunk)| (*length, caller.is_some() && trunk.username.as_deref() == caller));
        let Some((_, index, trunk)) = best else {
            let whose = match named {
                Some((_, trunk)) => format!("`prefixes` of [[sip.trunk]] `{}`", trunk.name),
                None => "`prefixes` of a [[sip.trunk]]".to_owned(),
            };
            return Err(DialError::Denied(format!("`{user}` begins with none of the {whose}")));
        };
        // Written anew: a parameter of the caller's (maddr, transport) or a header must not lead past the trunk.
        let user = trunk.numbers.as_ref().map_or(user, |numbers| numbers.written(&read(trunk)));
        Ok(Route { uri: at(trunk, &trunk.host, &user)?, trunk: Some((index, trunk)), user })
    }

    /// Our side of a call by `trunk`: an address as it stands, a user at the trunk, or `None` for a user of ours.
    ///
    /// # Errors
    /// It is no address.
    pub(super) fn caller(&self, from: Option<&str>, trunk: Option<&TrunkConfig>) -> Result<Caller, DialError> {
        let user = match from {
            Some(from) if from.contains('@') => match parse(from)? {
                Target::Uri(uri) => return Ok(Caller::Address(uri)),
                Target::User(user) => user,
            },
            Some(from) => from.strip_prefix("tel:").unwrap_or(from).to_owned(),
            None => trunk.and_then(|t| t.username.clone()).unwrap_or_else(|| "antiphon".to_owned()),
        };
        if user.is_empty() || unsafe_in_uri(&user) {
            return Err(DialError::Address(format!("`from` (`{user}`) is no SIP address or number")));
        }
        match trunk {
            Some(trunk) => {
                let user = trunk.numbers.as_ref().map_or(user.clone(), |n| n.written(&n.e164(&user)));
                at(trunk, &trunk.host, &user).map(|uri| Caller::Address(Box::new(uri)))
            }
            None => Ok(Caller::User(escape_user(&user))),
        }
    }
}

/// Who calls.
pub(super) enum Caller {
    Address(Box<Uri>),
    /// A user at our own address.
    User(String),
}

/// The registrar's address of a trunk.
pub(super) fn registrar(trunk: &TrunkConfig) -> Result<Uri, DialError> {
    let mut uri = at(trunk, &trunk.host, "x")?;
    uri.auth = None;
    uri.params.retain(|param| !matches!(param, Param::User(_)));
    Ok(uri)
}

/// `user` at a host of the trunk.
pub(super) fn at(trunk: &TrunkConfig, host: &str, user: &str) -> Result<Uri, DialError> {
    let transport = match trunk.transport {
        // An address that names no transport lets the host say which (RFC 3263 section 4.1).
        Transport::Udp | Transport::Auto => "",
        Transport::Tcp => ";transport=tcp",
        Transport::Tls => ";transport=tls",
    };
    let phone = if trunk.user_phone { ";user=phone" } else { "" };
    let text = format!("sip:{}@{host}{transport}{phone}", escape_user(user));
    Uri::try_from(text.as_str())
        .map_err(|_| DialError::Address(format!("`{user}` cannot be called at trunk `{}`", trunk.name)))
}

fn parse(to: &str) -> Result<Target, DialError> {
    let to = to.trim();
    if to.is_empty() || to.len() > MAX_TARGET || unsafe_in_uri(to) {
        return Err(DialError::Address(format!("`{to}` is no SIP address or telephone number")));
    }
    let lower = to.to_ascii_lowercase();
    let full = if lower.starts_with("sip:") || lower.starts_with("sips:") {
        to.to_owned()
    } else if to.contains('@') {
        format!("sip:{to}")
    } else {
        return Ok(Target::User(lower.strip_prefix("tel:").unwrap_or(to).to_owned()));
    };
    let uri = Uri::try_from(full.as_str()).ok().filter(|uri| !uri.host_with_port.host.to_string().is_empty());
    let uri = uri.ok_or_else(|| DialError::Address(format!("`{to}` is not a valid SIP URI")))?;
    // Both send a request elsewhere than the host says, or put headers into it.
    if !uri.headers.is_empty() || uri.params.iter().any(|param| matches!(param, Param::Maddr(_))) {
        return Err(DialError::Address(format!("`{to}`: headers and `maddr` in a destination are not taken")));
    }
    Ok(Target::Uri(Box::new(uri)))
}

fn unsafe_in_uri(text: &str) -> bool {
    text.chars().any(|c| c.is_control() || c.is_whitespace() || "<>\"\\".contains(c))
}

/// The user part of an address or number.
fn user_of(from: &str) -> &str {
    let from = from.trim();
    let from = from.strip_prefix("sips:").or_else(|| from.strip_prefix("sip:")).unwrap_or(from);
    let from = from.strip_prefix("tel:").unwrap_or(from);
    from.split('@').next().unwrap_or_default()
}

/// Whether `host` is one of the trunk's. Without a port it is: the trunk's is taken.
pub(super) fn leads_to(trunk: &TrunkConfig, host: &HostWithPort) -> bool {
    trunk.hosts().any(|(own, ..)| is_same(trunk, &own, host))
}

fn is_same(trunk: &TrunkConfig, own: &str, host: &HostWithPort) -> bool {
    let Ok(own) = HostWithPort::try_from(own) else { return false };
    let usual = if trunk.transport == Transport::Tls { 5061 } else { 5060 };
    let number = |host: &HostWithPort| host.port.as_ref().map_or(usual, |port| u16::from(*port));
    let same = match (&own.host, &host.host) {
        (Host::IpAddr(own), Host::IpAddr(other)) => own.to_canonical() == other.to_canonical(),
        (own, other) => own.to_string().eq_ignore_ascii_case(&other.to_string()),
    };
    same && (host.port.is_none() || number(&own) == number(host))
}

/// `user` as prefixes are compared with: without the separators that people write into numbers (RFC 3966 section
/// 5.1.1). `None`: it has parts that could make another number of it (parameters, escapes, several users).
fn comparable(user: &str) -> Option<String> {
    let plain = !user.is_empty() && user.bytes().all(|b| b.is_ascii_alphanumeric() || b"+*#-._()~!".contains(&b));
    plain.then(|| {
        let number = user.bytes().all(|b| !b.is_ascii_alphabetic());
        user.chars().filter(|c| !number || !"-.()".contains(*c)).collect()
    })
}

/// Length of the longest prefix of the trunk that `number` begins with; that of `*` is 0.
fn prefix(trunk: &TrunkConfig, number: &str) -> Option<usize> {
    let fits =
        |prefix: &String| if prefix == "*" { Some(0) } else { number.starts_with(prefix).then_some(prefix.len()) };
    trunk.prefixes.iter().filter_map(fits).max()
}

/// Percent-escapes what a user part may not hold (RFC 3261 section 25.1), as `#` of a number.
fn escape_user(user: &str) -> String {
    user.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.!~*'()&=+$,;?/%".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

/// Whether every address is loopback.
pub(super) fn all_loopback(addresses: impl IntoIterator<Item = IpAddr>) -> bool {
    addresses.into_iter().all(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(outbound: &str) -> SipConfig {
        toml::from_str(&format!(
            r#"
            outbound = "{outbound}"
            [[trunk]]
            name = "first"
            host = "first.example"
            username = "one"
            prefixes = ["+49", "+4930"]
            [[trunk]]
            name = "second"
            host = "192.0.2.9:5070"
            username = "two"
            prefixes = ["+4930", "+1"]
            [[trunk]]
            name = "closed"
            host = "closed.example"
            [[trunk]]
            name = "open"
            host = "open.example"
            transport = "tcp"
            prefixes = ["*"]
            "#
        ))
        .expect("valid")
    }

    fn routed(config: &SipConfig, to: &str, from: Option<&str>, trunk: Option<&str>) -> Result<String, DialError> {
        let plan = Dialplan { config, local: false };
        plan.route(to, from, trunk).map(|route| route.uri.to_string())
    }

    #[test]
    fn the_longest_prefix_chooses_the_trunk_and_the_caller_between_equals() {
        let config = config("trunks");
        for (to, from, uri) in [
            ("+49-89-1", None, "sip:+49-89-1@first.example"),
            ("+1 (555) 1".replace(' ', "").as_str(), None, "sip:+1(555)1@192.0.2.9:5070"),
            ("+4930", None, "sip:+4930@first.example"),
            ("+4930", Some("two"), "sip:+4930@192.0.2.9:5070"),
            ("+4930", Some("sip:two@anywhere.example"), "sip:+4930@192.0.2.9:5070"),
            ("tel:+338", None, "sip:+338@open.example;transport=TCP"),
            ("sip:+4930@FIRST.example", None, "sip:+4930@first.example"),
        ] {
            let found = routed(&config, to, from, None).expect(to);
            assert!(found.eq_ignore_ascii_case(uri), "{to}: {found}");
        }
        let named = routed(&config, "+4930", None, Some("second")).expect("allowed");
        assert_eq!(named, "sip:+4930@192.0.2.9:5070");
        assert!(matches!(routed(&config, "+4930", None, Some("third")), Err(DialError::UnknownTrunk(_))));
    }

    #[test]
    fn a_trunk_that_knows_numbers_compares_and_writes_them_in_one_form() {
        let config: SipConfig = toml::from_str(
            r#"
            [[trunk]]
            name = "germany"
            host = "sip.example"
            targets = [{ host = "192.0.2.9:5070" }]
            prefixes = ["+49"]
            user_phone = true
            numbers = { country = "49", send = "international" }
            "#,
        )
        .expect("valid");
        for to in
            ["+4930123", "004930123", "030123", "tel:030-123", "sip:030123@sip.example", "sip:030123@192.0.2.9:5070"]
        {
            let uri = routed(&config, to, None, None).expect(to);
            assert_eq!(uri, "sip:004930123@sip.example;user=phone", "{to}");
        }
        // Satellites, written as a number of this country would be.
        for to in ["008811234", "+8811234", "0088-11234"] {
            assert!(matches!(routed(&config, to, None, None), Err(DialError::Denied(_))), "{to}");
        }
        let plan = Dialplan { config: &config, local: false };
        let Ok(Caller::Address(caller)) = plan.caller(Some("030999"), config.trunk.first()) else {
            panic!("an address")
        };
        assert_eq!(caller.to_string(), "sip:004930999@sip.example;user=phone");
        assert_eq!(registrar(&config.trunk[0]).expect("a host").to_string(), "sip:sip.example");
    }

    #[test]
    fn a_hundred_forbidden_destinations_lead_nowhere() {
        let mut config = config("trunks");
        config.trunk.retain(|trunk| trunk.name != "open");
        let mut asked: Vec<(String, Option<&str>)> = Vec::new();
        // Premium numbers and satellites, in the ways that people write them.
        for country in ["+88", "+23", "+252", "+960", "+675", "0088", "011881", "900", "+2", "+7"] {
            for rest in ["1234567", "-123-4567", "(12)34567", "12345;phone-context=+49"] {
                asked.push((format!("{country}{rest}"), None));
                asked.push((format!("{country}{rest}"), Some("first")));
            }
        }
        for uri in [
            "sip:+4930@203.0.113.5",
            "sip:+4930@first.example.evil.example",
            "sip:+4930@evil.example;maddr=first.example",
            "sip:+4930@first.example;maddr=203.0.113.5",
            "sip:+4930@first.example?Route=%3Csip:203.0.113.5%3E",
            "sip:+4930@192.0.2.9:5060",
            "sip:x@127.0.0.1:5070",
            "sip:x@localhost",
            "sip:%2B49301@first.example",
            "sip:+4930;evil=+88@first.example",
        ] {
            asked.push((uri.to_owned(), None));
            asked.push((uri.to_owned(), Some("second")));
        }
        asked.push(("+4930".to_owned(), Some("closed")));
        assert!(asked.len() >= 100);
        for (to, trunk) in &asked {
            let result = routed(&config, to, None, *trunk);
            assert!(
                matches!(result, Err(DialError::Denied(_) | DialError::Address(_))),
                "{to} by {trunk:?}: {result:?}"
            );
        }
        let Err(DialError::Denied(why)) = routed(&config, "+8812", None, Some("first")) else { panic!("allowed") };
        assert!(why.contains("prefixes") && why.contains("first"), "{why}");
    }

    #[test]
    fn deny_means_everything() {
        let config = config("deny");
        for (to, trunk) in [("+4930", None), ("+4930", Some("first")), ("sip:x@127.0.0.1", None)] {
            let plan = Dialplan { config: &config, local: true };
            let result = plan.route(to, None, trunk);
            assert!(
                matches!(&result, Err(DialError::Denied(why)) if why.contains("[sip] outbound")),
                "{to}: {result:?}"
            );
        }
    }

    #[test]
    fn loopback_calls_loopback() {
        let config = SipConfig::default();
        let plan = |local| Dialplan { config: &config, local };
        for host in ["127.0.0.1:5080", "[::1]"] {
            let to = format!("sip:x@{host}");
            assert!(plan(true).route(&to, None, None).is_ok_and(|route| route.trunk.is_none()), "{to}");
            assert!(matches!(plan(false).route(&to, None, None), Err(DialError::Denied(_))), "{to}");
        }
        assert!(matches!(plan(true).route("sip:x@192.0.2.1", None, None), Err(DialError::Denied(_))));
    }

    #[test]
    fn numbers_are_escaped() {
        assert_eq!(escape_user("+49*21#"), "+49*21%23");
    }
}
