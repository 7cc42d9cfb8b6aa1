//! Names and addresses: where trunks are, what a name may resolve to, and what peers' headers may lead to.
//!
//! # Why
//! *The stack resolves the names in what it receives*: of a Contact before a request in its dialog, of a Via before
//! an answer. The latter it does in the one loop that reads all messages, so that a name whose server is slow stops
//! everybody's signalling. In that loop only what was found before is given ([`in_signalling`]).
//!
//! *A name is as good as an address*: one that leads into this host's or a private network is refused unless it is
//! a trunk's, or the network is among `internal_networks`.
//!
//! *A Contact that may not be used* is mostly that of a telephone behind NAT, which writes the address that it knows.
//! It is replaced by the address that the message came from.

use std::{
    collections::HashMap,
    future::Future,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rsipstack::{
    sip::{
        Contact, Header, Headers, Host, HostWithPort, SipMessage, Uri,
        prelude::{HeadersExt, ToTypedHeader},
    },
    transport::{SipAddr, transport_layer::DomainResolver},
};
use tokio::time::timeout;

use super::{
    config::{Network, Secret, SipConfig, TrunkConfig},
    resolve::Directory,
};
use crate::reach::{self, Scope};

/// Time for a look-up of a host name.
pub(super) const LOOK_UP: Duration = Duration::from_secs(5);
/// Names remembered for the signalling loop.
const MAX_NAMES: usize = 1_024;
/// Addresses remembered of a trunk; beyond it the oldest is forgotten.
const MAX_ADDRESSES: usize = 32;

tokio::task_local! {
    static SIGNALLING: ();
    static PINNED: (Host, SipAddr);
}

/// Runs requests of a task to the host of `uri`, which go to `address` of its addresses. The stack keeps the name, by which TLS
/// knows the host's certificate. Without an address: where the stack finds it.
pub(super) async fn pinned<F: Future>(uri: &Uri, address: Option<&SipAddr>, work: F) -> F::Output {
    match address {
        Some(address) => PINNED.scope((uri.host_with_port.host.clone(), address.clone()), work).await,
        None => work.await,
    }
}

/// Runs the stack's loop, in which nothing may wait for a name server.
pub(super) fn in_signalling<F: Future>(work: F) -> impl Future<Output = F::Output> {
    SIGNALLING.scope((), work)
}

/// Which addresses belong to which trunk, in the order of the configuration. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Carriers(Arc<Mutex<Vec<Carrier>>>);

#[derive(Debug)]
struct Carrier {
    hosts: Vec<HostWithPort>,
    realm: Option<String>,
    /// What we are known as there, and the password.
    account: Option<(String, Secret)>,
    addresses: Vec<IpAddr>,
}

impl Carrier {
    /// One without a name is no trunk any more, and nowhere.
    fn new(trunk: &TrunkConfig) -> Carrier {
        let host = |(host, ..): (String, u16, u16)| HostWithPort::try_from(host.as_str()).unwrap_or_default();
        let hosts: Vec<_> = trunk.hosts().filter(|_| !trunk.name.is_empty()).map(host).collect();
        let address = |host: &HostWithPort| match host.host {
            Host::IpAddr(ip) => Some(ip.to_canonical()),
            Host::Domain(_) => None,
        };
        let addresses = hosts.iter().filter_map(address).collect();
        let account = trunk.username.clone().zip(trunk.password.clone());
        Carrier { hosts, realm: trunk.realm.clone(), account, addresses }
    }

    fn is_at(&self, name: &Host) -> bool {
        self.hosts.iter().any(|host| same_host(&host.host, name))
    }
}

impl Carriers {
    pub(super) fn new(config: &SipConfig) -> Carriers {
        Carriers(Arc::new(Mutex::new(config.trunk.iter().map(Carrier::new).collect())))
    }

    /// Other trunks, and perhaps more of them. What was found of hosts that stay is known still.
    pub(super) fn apply(&self, config: &SipConfig) {
        let mut carriers = self.lock();
        for (index, trunk) in config.trunk.iter().enumerate() {
            let new = Carrier::new(trunk);
            match carriers.get_mut(index) {
                Some(before) if before.hosts == new.hosts => {
                    (before.realm, before.account) = (new.realm, new.account);
                }
                Some(before) => *before = new,
                None => carriers.push(new),
            }
        }
    }

    /// The place of the trunk that `ip` belongs to.
    pub(super) fn find(&self, ip: IpAddr) -> Option<usize> {
        self.lock().iter().position(|carrier| carrier.addresses.contains(&ip.to_canonical()))
    }

    /// The password of `username` at the trunk whose host is named so.
    pub(super) fn password(&self, host: &Host, username: &str) -> Option<Secret> {
        let carriers = self.lock();
        let mut accounts = carriers.iter().filter(|carrier| carrier.is_at(host)).filter_map(|one| one.account.as_ref());
        accounts.find(|(name, _)| name == username).map(|(_, password)| password.clone())
    }

    /// Whether a trunk's host is named so, with or without a port.
    fn is_host(&self, name: &Host) -> bool {
        self.lock().iter().any(|carrier| carrier.is_at(name))
    }

    /// Who asks for the credentials that a request to the host `name` would bring, from `ip`.
    pub(super) fn challenger(&self, name: &Host, ip: IpAddr) -> Challenger {
        let carriers = self.lock();
        let mut at_host = carriers.iter().filter(|carrier| carrier.is_at(name)).peekable();
        if at_host.peek().is_none() {
            return Challenger::Unknown;
        }
        let found = at_host.find(|carrier| carrier.addresses.contains(&ip.to_canonical()));
        found.map_or(Challenger::Foreign, |carrier| Challenger::Trunk(carrier.realm.clone()))
    }

    /// The host `name` was found to have `ip`.
    pub(super) fn found(&self, name: &Host, ip: IpAddr) {
        let ip = ip.to_canonical();
        for carrier in self.lock().iter_mut().filter(|carrier| carrier.is_at(name)) {
            if !carrier.addresses.contains(&ip) {
                if carrier.addresses.len() >= MAX_ADDRESSES {
                    carrier.addresses.remove(0);
                }
                carrier.addresses.push(ip);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Carrier>> {
        // Nothing here panics while it holds one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who asks for credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenger {
    /// None that we have one for.
    Unknown,
    /// Somebody else than the trunk that the request was for: it gets none.
    Foreign,
    /// The trunk, for this realm only where one is configured.
    Trunk(Option<String>),
}

fn same_host(a: &Host, b: &Host) -> bool {
    match (a, b) {
        (Host::IpAddr(a), Host::IpAddr(b)) => a.to_canonical() == b.to_canonical(),
        (a, b) => a.to_string().eq_ignore_ascii_case(&b.to_string()),
    }
}

/// What may be named. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Naming {
    internal: Arc<[Network]>,
    /// How near addresses may be that a name leads to: as near as we are.
    own: Scope,
}

impl Naming {
    /// `bound`: the addresses of the listeners.
    pub(super) fn new(config: &SipConfig, bound: impl IntoIterator<Item = IpAddr>) -> Naming {
        // Of several the farthest; an unspecified one may be anywhere.
        let own = bound.into_iter().map(|ip| reach::scope(ip).unwrap_or(Scope::Global)).max();
        Naming { internal: config.internal_networks.clone().into(), own: own.unwrap_or(Scope::Global) }
    }

    /// Whether a peer at `source` may have us send to `named`.
    pub(super) fn allows(&self, source: IpAddr, named: IpAddr) -> bool {
        reach::may_name(source, named) || self.internal.iter().any(|network| network.contains(named))
    }

    /// Whether a name that a peer wrote may lead to `found`.
    fn resolves_to(&self, found: IpAddr) -> bool {
        reach::scope(found).is_some_and(|scope| scope >= self.own)
            || self.internal.iter().any(|network| network.contains(found))
    }

    /// Takes out of a message from `from` what would lead requests in its dialog to where they must not go.
    pub(super) fn amend(&self, message: &mut SipMessage, from: SocketAddr) {
        let first_hop = match message.typed_record_route_headers() {
            // A request's route set is in the order of its headers, a response's in the other (RFC 3261 section 12.1).
            Ok(routes) if message.is_request() => routes.into_iter().next(),
            Ok(routes) => routes.into_iter().next_back(),
            Err(_) => None,
        };
        if first_hop.is_some_and(|route| self.is_forbidden(from, &route.uri.host_with_port.host)) {
            headers(message).retain(|header| !matches!(header, Header::RecordRoute(_)));
        }
        let contact = message.contact_header().ok().and_then(|contact| contact.typed().ok());
        let Some(mut contact) = contact.filter(|c| self.is_forbidden(from, &c.uri.host_with_port.host)) else { return };
        contact.uri.host_with_port = from.into();
        let amended = Header::Contact(Contact::new(format!("<{}>", contact.uri)));
        headers(message).retain(|header| !matches!(header, Header::Contact(_)));
        headers(message).push(amended);
    }

    fn is_forbidden(&self, from: SocketAddr, host: &Host) -> bool {
        matches!(host, Host::IpAddr(ip) if !self.allows(from.ip(), *ip))
    }
}

fn headers(message: &mut SipMessage) -> &mut Headers {
    match message {
        SipMessage::Request(request) => &mut request.headers,
        SipMessage::Response(response) => &mut response.headers,
    }
}

/// What the stack asks for hosts: the directory with a guard.
pub(super) struct Names {
    directory: Directory,
    naming: Naming,
    carriers: Carriers,
    known: Mutex<HashMap<String, SipAddr>>,
}

impl Names {
    pub(super) fn new(directory: Directory, naming: Naming, carriers: Carriers) -> Names {
        Names { directory, naming, carriers, known: Mutex::default() }
    }

    /// The first address of a host; an error for people, where there is none.
    async fn look_up(&self, target: &SipAddr) -> Result<SipAddr, String> {
        let Host::Domain(domain) = &target.addr.host else { return Err("no name".to_owned()) };
        // Such a name never has an address (RFC 6761 section 6.4): Contacts that cannot be reached bear it.
        if domain.0 == "invalid" || domain.0.ends_with(".invalid") {
            return Err("no address".to_owned());
        }
        let (names, port) = (&*self.directory.names, target.addr.port);
        let found = self.directory.find(names, domain, port, target.r#type).await?;
        let first = found.first().ok_or("no address")?;
        Ok(SipAddr::new(first.transport, first.addr.into()))
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, SipAddr>> {
        // Nothing here panics while it holds one.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl DomainResolver for Names {
    async fn resolve(&self, target: &SipAddr) -> rsipstack::Result<SipAddr> {
        let error = |why: &str| rsipstack::Error::DnsResolutionError(format!("{target}: {why}"));
        let pinned = PINNED.try_with(|(host, address)| same_host(host, &target.addr.host).then(|| address.clone()));
        if let Ok(Some(address)) = pinned {
            return Ok(address);
        }
        let key = target.to_string();
        if SIGNALLING.try_with(|()| ()).is_ok() {
            return self.known().get(&key).cloned().ok_or_else(|| error("no name is looked up for an answer"));
        }
        let found = timeout(LOOK_UP, self.look_up(target)).await.map_err(|_| error("no answer in time"))?;
        let found = found.map_err(|why| error(&why))?;
        let Ok(address) = found.get_socketaddr() else { return Err(error("no address")) };
        if self.carriers.is_host(&target.addr.host) {
            self.carriers.found(&target.addr.host, address.ip());
        } else if !self.naming.resolves_to(address.ip()) {
            return Err(error("leads to an address that [sip] internal_networks does not allow"));
        }
        let mut known = self.known();
        // overflow: drops: what is forgotten here is looked up again where that may wait
        if known.len() >= MAX_NAMES {
            known.clear();
        }
        known.insert(key, found.clone());
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sip::resolve::Families;

    fn naming(bound: &str, internal: &str) -> Naming {
        let config: SipConfig = toml::from_str(&format!("internal_networks = [{internal}]")).expect("valid");
        Naming::new(&config, [bound.parse().expect("an address")])
    }

    fn directory() -> Directory {
        Directory::new(None, Families::of([IpAddr::from([127, 0, 0, 1])].into_iter()))
    }

    fn invite(contact: &str, routes: &[&str]) -> SipMessage {
        let routes: String = routes.iter().map(|route| format!("Record-Route: {route}\r\n")).collect();
        let text = format!(
            "INVITE sip:x@192.0.2.9 SIP/2.0\r\nVia: SIP/2.0/UDP h;branch=z9hG4bK1\r\nFrom: <sip:a@b>;tag=1\r\n\
             To: <sip:x@y>\r\nCall-ID: 1\r\nCSeq: 1 INVITE\r\nContact: {contact}\r\n{routes}Content-Length: 0\r\n\r\n"
        );
        SipMessage::try_from(text.as_bytes()).expect("parses")
    }

    fn amended(contact: &str, routes: &[&str], from: &str) -> (String, usize) {
        let mut message = invite(contact, routes);
        naming("192.0.2.9", "").amend(&mut message, from.parse().expect("an address"));
        let contact = message.contact_header().expect("one").value().to_owned();
        (contact, message.record_route_headers().len())
    }

    #[test]
    fn contacts_that_lead_inside_lead_back_to_their_sender() {
        let from = "203.0.113.7:1024";
        for inside in ["10.0.0.5", "127.0.0.1:25", "169.254.169.254", "[::1]", "0.0.0.0", "224.0.0.5"] {
            let (contact, _) = amended(&format!("\"A\" <sip:a@{inside};ob>"), &[], from);
            assert!(contact.starts_with("<sip:a@203.0.113.7:1024"), "{inside}: {contact}");
        }
        let public = "<sip:a@198.51.100.3:5070>";
        assert_eq!(amended(public, &[], from).0, public);
        assert_eq!(amended("<sip:a@host.example>", &[], from).0, "<sip:a@host.example>");
        let private = "<sip:a@10.0.0.5>";
        assert_eq!(amended(private, &[], "192.168.1.1:5060").0, private, "from a network of that kind");
    }

    #[test]
    fn routes_that_begin_inside_are_not_followed() {
        let from = "203.0.113.7:1024";
        let (inside, outside) = ("<sip:10.0.0.5;lr>", "<sip:203.0.113.7;lr>");
        assert_eq!(amended("<sip:a@198.51.100.3>", &[inside, outside], from).1, 0);
        assert_eq!(amended("<sip:a@198.51.100.3>", &[outside, inside], from).1, 2, "what is behind a proxy is its own");
        assert_eq!(amended("<sip:a@198.51.100.3>", &[inside], "10.0.0.5:5060").1, 1);
    }

    #[test]
    fn names_lead_as_near_as_we_are_and_to_what_is_configured() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let public = naming("0.0.0.0", "\"10.1.0.0/16\"");
        assert!(public.resolves_to(ip("198.51.100.1")) && public.resolves_to(ip("10.1.2.3")));
        assert!(!public.resolves_to(ip("10.2.0.1")) && !public.resolves_to(ip("127.0.0.1")));
        assert!(public.allows(ip("203.0.113.1"), ip("10.1.2.3")));
        let private = naming("192.168.0.9", "");
        assert!(private.resolves_to(ip("192.168.0.3")) && !private.resolves_to(ip("127.0.0.1")));
        assert!(naming("127.0.0.1", "").resolves_to(ip("127.0.0.1")));
    }

    #[tokio::test]
    async fn in_the_signalling_loop_no_name_is_looked_up() {
        let config = SipConfig::default();
        let names = Names::new(directory(), naming("127.0.0.1", ""), Carriers::new(&config));
        let localhost = SipAddr::from(HostWithPort::try_from("localhost:5060").expect("a host"));
        assert!(in_signalling(names.resolve(&localhost)).await.is_err());
        // What was found elsewhere is known there, too.
        if names.resolve(&localhost).await.is_ok() {
            assert!(in_signalling(names.resolve(&localhost)).await.is_ok());
        }
    }

    #[tokio::test]
    async fn a_name_leads_where_its_task_has_it() {
        let names = Names::new(directory(), naming("127.0.0.1", ""), Carriers::new(&SipConfig::default()));
        let host = |name: &str| SipAddr::from(HostWithPort::try_from(name).expect("a host"));
        let (uri, address) = (Uri::try_from("sip:x@Nowhere.invalid").expect("valid"), host("192.0.2.7:5061"));
        assert!(names.resolve(&host("nowhere.invalid:5061")).await.is_err());
        let found = pinned(&uri, Some(&address), names.resolve(&host("nowhere.invalid:5061"))).await;
        assert_eq!(found.ok(), Some(address.clone()));
        assert!(pinned(&uri, Some(&address), names.resolve(&host("else.invalid"))).await.is_err(), "another host");
        assert!(pinned(&uri, None, names.resolve(&host("nowhere.invalid"))).await.is_err());
    }

    #[test]
    fn trunks_are_known_by_their_addresses() {
        let config: SipConfig = toml::from_str(
            "[[trunk]]\nname = \"a\"\nhost = \"192.0.2.1:5070\"\n[[trunk]]\nname = \"b\"\nhost = \"b.example\"\nrealm = \"r\"\n",
        )
        .expect("valid");
        let carriers = Carriers::new(&config);
        let ip = IpAddr::from([198, 51, 100, 1]);
        assert_eq!((carriers.find([192, 0, 2, 1].into()), carriers.find(ip)), (Some(0), None));
        carriers.found(&Host::Domain("B.example".into()), ip);
        assert_eq!(carriers.find(ip), Some(1));
        let (a, b) = (Host::IpAddr([192, 0, 2, 1].into()), Host::Domain("b.example".into()));
        assert_eq!(carriers.challenger(&b, ip), Challenger::Trunk(Some("r".to_owned())));
        assert_eq!(carriers.challenger(&a, ip), Challenger::Foreign);
        assert_eq!(carriers.challenger(&Host::Domain("c.example".into()), ip), Challenger::Unknown);
        for n in 0..1_000_u32 {
            carriers.found(&Host::Domain("b.example".into()), IpAddr::from(n.to_be_bytes()));
        }
        assert_eq!(carriers.lock()[1].addresses.len(), MAX_ADDRESSES);
    }
}
