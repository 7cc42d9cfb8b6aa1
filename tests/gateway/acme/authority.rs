//! An authority that issues certificates as RFC 8555 says, as far as a client can see: nonces that are good once, signed
//! requests, orders, and proofs that it goes and looks at (RFC 8737).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use antiphon::certificate::{CHALLENGE, Certificate};
use antiphon::clock;
use antiphon::handover::Place;
use antiphon::server::{self, Bounds, Manners};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, PublicKeyData, SignatureAlgorithm,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::sync::watch;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

use super::handshake;

/// What its certificates say who issued them.
pub(crate) const NAME: &str = "An authority of the tests";
const DAY: Duration = Duration::from_secs(86_400);

/// Refuses to take an order, or finds no proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refuse {
    Nothing,
    Orders,
    Proofs,
}

/// It. Dropped, it ends.
pub(crate) struct Authority {
    pub(crate) directory: String,
    /// PEM file of what its own HTTPS is trusted by.
    pub(crate) roots: PathBuf,
    state: Arc<Desk>,
    _stop: watch::Sender<bool>,
}

struct Desk {
    base: String,
    issuer: CertifiedIssuer<'static, KeyPair>,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    /// Where every name leads to, once that is known.
    gateway: Option<SocketAddr>,
    refuse: Option<Refuse>,
    nonces: BTreeSet<String>,
    /// Made so far: nonces, orders, and certificates.
    made: usize,
    accounts: Vec<Account>,
    orders: Vec<Order>,
    /// Nonces that were called bad although they were not; orders that were refused; proofs that were not found.
    pub(crate) spoilt: usize,
    pub(crate) refused: usize,
    pub(crate) unproved: usize,
}

struct Account {
    /// The point, as a signature is verified with.
    key: Vec<u8>,
    thumbprint: String,
    contact: Value,
}

struct Order {
    names: Vec<String>,
    tokens: Vec<String>,
    /// By name: none yet, seen, not seen.
    proved: BTreeMap<String, Result<(), String>>,
    certificate: Option<String>,
}

/// What a request says, once it is known to be somebody's.
struct Said {
    payload: Value,
    account: usize,
}

type Problem = (StatusCode, &'static str, String);

impl Authority {
    /// On a free port; its files go to `folder`.
    pub(crate) async fn start(folder: &Path) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, NAME);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed");
        let own = KeyPair::generate().expect("a key");
        let listed = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("an address");
        let certificate = listed.signed_by(&own, &issuer).expect("signed");
        let (roots, file) = (folder.join("roots.pem"), folder.join("authority.pem"));
        let root: &rcgen::Certificate = issuer.as_ref();
        std::fs::write(&roots, root.pem()).expect("written");
        std::fs::write(&file, certificate.pem() + &own.serialize_pem()).expect("written");

        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("https://{}", listener.local_addr().expect("bound"));
        let state = Arc::new(Desk { base: base.clone(), issuer, books: Mutex::default() });
        let router = Router::new().fallback(answer).with_state(state.clone());
        let certificate = Certificate::open("its own", &file, &file).expect("usable");
        let bounds = Bounds { all: 64, per_address: 64 };
        let (stop, stopped) = watch::channel(false);
        let manners =
            Manners { bounds, certificate: Some(certificate), grace: Duration::ZERO, place: Place::default() };
        tokio::spawn(server::serve(listener, router, stopped, manners));
        Authority { directory: format!("{base}/directory"), roots, state, _stop: stop }
    }

    /// Where names lead to from now on, and what is refused.
    pub(crate) fn settle(&self, gateway: Option<SocketAddr>, refuse: Refuse) {
        let mut books = self.state.books();
        (books.gateway, books.refuse) = (gateway, Some(refuse));
    }

    /// Accounts, with the contact of the first; orders; nonces called bad, orders refused, proofs not found.
    pub(crate) fn told(&self) -> (usize, Value, usize, [usize; 3]) {
        let books = self.state.books();
        let contact = books.accounts.first().map_or(Value::Null, |account| account.contact.clone());
        (books.accounts.len(), contact, books.orders.len(), [books.spoilt, books.refused, books.unproved])
    }
}

impl Desk {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("not poisoned")
    }

    /// A fresh nonce (RFC 8555 section 6.5).
    fn nonce(&self) -> String {
        let mut books = self.books();
        books.made += 1;
        let nonce = BASE64.encode(Sha256::digest(books.made.to_be_bytes()));
        books.nonces.insert(nonce.clone());
        nonce
    }

    /// Reads and verifies a signed request (RFC 8555 section 6.2).
    fn verify(&self, path: &str, headers: &HeaderMap, body: &[u8]) -> Result<Said, Problem> {
        let bad = |why: &str| (StatusCode::BAD_REQUEST, "malformed", why.to_owned());
        if headers.get(header::CONTENT_TYPE).is_none_or(|kind| kind != "application/jose+json") {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "malformed", "not application/jose+json".into()));
        }
        let signed: Value = serde_json::from_slice(body).map_err(|_| bad("no JSON"))?;
        let part = |name: &str| signed[name].as_str().unwrap_or_default().to_owned();
        let decoded = |text: &str| BASE64.decode(text).unwrap_or_default();
        let protected: Value = serde_json::from_slice(&decoded(&part("protected"))).map_err(|_| bad("no header"))?;
        if protected["alg"] != "ES256" || protected["url"] != format!("{}{path}", self.base).as_str() {
            return Err(bad("alg or url"));
        }
        let mut books = self.books();
        let nonce = protected["nonce"].as_str().unwrap_or_default();
        if !books.nonces.remove(nonce) {
            return Err((StatusCode::BAD_REQUEST, "badNonce", "used or unknown".into()));
        }
        // Once, as nonces expire while a client thinks.
        if path == "/order" && books.spoilt == 0 {
            books.spoilt += 1;
            return Err((StatusCode::BAD_REQUEST, "badNonce", "it has expired".into()));
        }
        let jwk = &protected["jwk"];
        let known = match protected["kid"].as_str() {
            Some(kid) => {
                let number = kid.strip_prefix(&format!("{}/account/", self.base)).and_then(|n| n.parse::<usize>().ok());
                let number = number.filter(|number| *number < books.accounts.len());
                number.ok_or((StatusCode::BAD_REQUEST, "accountDoesNotExist", "no such account".into()))?
            }
            None if path == "/account" && jwk["crv"] == "P-256" => books.accounts.len(),
            None => return Err(bad("neither kid nor jwk where it belongs")),
        };
        let key = match books.accounts.get(known) {
            Some(account) => account.key.clone(),
            None => {
                let (x, y) = (decoded(jwk["x"].as_str().unwrap_or("")), decoded(jwk["y"].as_str().unwrap_or("")));
                [vec![4], x, y].concat()
            }
        };
        let message = format!("{}.{}", part("protected"), part("payload"));
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &key)
            .verify(message.as_bytes(), &decoded(&part("signature")))
            .map_err(|_| bad("the signature is wrong"))?;
        let payload = decoded(&part("payload"));
        let payload = if payload.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&payload).map_err(|_| bad("payload"))?
        };
        if books.accounts.len() == known {
            let canonical = format!("{{\"crv\":\"P-256\",\"kty\":\"EC\",\"x\":{},\"y\":{}}}", jwk["x"], jwk["y"]);
            let thumbprint = BASE64.encode(Sha256::digest(canonical));
            books.accounts.push(Account { key, thumbprint, contact: payload["contact"].clone() });
        }
        Ok(Said { payload, account: known })
    }

    fn describe(&self, number: usize, order: &Order) -> Value {
        let proved = order.proved.values().filter(|proof| proof.is_ok()).count();
        let status = match &order.certificate {
            Some(_) => "valid",
            None if order.proved.values().any(Result::is_err) => "invalid",
            None if proved == order.names.len() => "ready",
            None => "pending",
        };
        let authorizations: Vec<String> =
            (0..order.names.len()).map(|n| format!("{}/authorization/{number}/{n}", self.base)).collect();
        let identifiers: Vec<Value> = order.names.iter().map(|name| json!({ "type": "dns", "value": name })).collect();
        let mut told = json!({
            "status": status, "identifiers": identifiers, "authorizations": authorizations,
            "finalize": format!("{}/finalize/{number}", self.base),
        });
        if order.certificate.is_some() {
            told["certificate"] = format!("{}/certificate/{number}", self.base).into();
        }
        told
    }

    /// Signs what a request for a certificate asks for. Eight ninths of its life are over: it is due at once.
    fn sign(&self, csr: &[u8], names: &[String]) -> Result<String, Problem> {
        let bad = |why: &str| (StatusCode::BAD_REQUEST, "badCSR", why.to_owned());
        let (_, request) = X509CertificationRequest::from_der(csr).map_err(|_| bad("unreadable"))?;
        let info = &request.certification_request_info;
        let key = info.subject_pki.subject_public_key.data.to_vec();
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key)
            .verify(info.raw, &request.signature_value.data)
            .map_err(|_| bad("not signed by its key"))?;
        let asked: BTreeSet<String> = request
            .requested_extensions()
            .into_iter()
            .flatten()
            .filter_map(|extension| match extension {
                ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
                _ => None,
            })
            .flatten()
            .filter_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                _ => None,
            })
            .collect();
        if asked != names.iter().cloned().collect() {
            return Err(bad("it is for other names than the order"));
        }
        let mut params = CertificateParams::new(names.to_vec()).map_err(|_| bad("names"))?;
        let now = UNIX_EPOCH + clock::wall();
        (params.not_before, params.not_after) = ((now - 80 * DAY).into(), (now + 10 * DAY).into());
        let certificate = params.signed_by(&Theirs(key), &self.issuer).map_err(|_| bad("cannot be signed"))?;
        let root: &rcgen::Certificate = self.issuer.as_ref();
        Ok(certificate.pem() + &root.pem())
    }

    /// Goes to the name and looks for its proof (RFC 8737 section 3).
    async fn look(&self, name: &str, wanted: [u8; 32]) -> Result<(), String> {
        let (gateway, refuse) = loop {
            let (gateway, refuse) = {
                let books = self.books();
                (books.gateway, books.refuse)
            };
            match gateway {
                Some(gateway) => break (gateway, refuse),
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        if refuse == Some(Refuse::Proofs) {
            return Err("nobody answers there".into());
        }
        let (leaf, spoken) = handshake(gateway, name, &[CHALLENGE]).await.map_err(|error| error.to_string())?;
        let (_, shown) = x509_parser::parse_x509_certificate(&leaf).map_err(|error| error.to_string())?;
        let names = shown.subject_alternative_name().ok().flatten().map(|names| names.value.general_names.clone());
        let named = names.is_some_and(|names| matches!(&names[..], [GeneralName::DNSName(one)] if *one == name));
        let proof = shown.extensions().iter().find(|extension| extension.oid.to_id_string() == "1.3.6.1.5.5.7.1.31");
        // An octet string of 32 bytes.
        let proved = proof.is_some_and(|proof| proof.critical && proof.value == [&[4, 32][..], &wanted].concat());
        match spoken.as_deref() == Some(CHALLENGE) && named && proved {
            true => Ok(()),
            false => Err(format!("what {name} shows is no proof")),
        }
    }
}

/// A key that somebody else has.
struct Theirs(Vec<u8>);

impl PublicKeyData for Theirs {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

async fn answer(State(desk): State<Arc<Desk>>, method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let answered = respond(&desk, &method, uri.path(), &headers, &body);
    let mut response = answered.unwrap_or_else(|(status, kind, detail)| {
        let problem = json!({
            "type": format!("urn:ietf:params:acme:error:{kind}"), "detail": detail, "status": status.as_u16(),
        });
        (status, [(header::CONTENT_TYPE, "application/problem+json")], problem.to_string()).into_response()
    });
    response.headers_mut().insert("replay-nonce", desk.nonce().parse().expect("letters"));
    response
}

fn respond(
    desk: &Arc<Desk>,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, Problem> {
    let base = &desk.base;
    let at = |path: String| [(header::LOCATION, format!("{base}{path}"))];
    let nothing = || (StatusCode::NOT_FOUND, "malformed", "there is nothing here".to_owned());
    if path == "/directory" {
        let urls = json!({
            "newNonce": format!("{base}/nonce"), "newAccount": format!("{base}/account"), "newOrder": format!("{base}/order"),
        });
        return Ok(urls.to_string().into_response());
    }
    if path == "/nonce" {
        return Ok(().into_response());
    }
    if method != Method::POST {
        return Err((StatusCode::METHOD_NOT_ALLOWED, "malformed", "everything is a POST".into()));
    }
    let said = desk.verify(path, headers, body)?;
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let number = |n: usize| parts.get(n).and_then(|part| part.parse::<usize>().ok()).ok_or_else(nothing);
    let mut books = desk.books();
    match parts[0] {
        "account" => {
            let account = json!({ "status": "valid" }).to_string();
            Ok((StatusCode::CREATED, at(format!("/account/{}", said.account)), account).into_response())
        }
        "order" if parts.len() == 1 => {
            if books.refuse == Some(Refuse::Orders) {
                books.refused += 1;
                return Err((StatusCode::FORBIDDEN, "rejectedIdentifier", "not for this name today".into()));
            }
            let names = said.payload["identifiers"].as_array().into_iter().flatten();
            let names: Vec<String> = names.filter_map(|name| Some(name["value"].as_str()?.to_owned())).collect();
            let number = books.orders.len();
            let tokens = names.iter().map(|name| BASE64.encode(Sha256::digest(format!("{number}{name}")))).collect();
            let order = Order { names, tokens, proved: BTreeMap::new(), certificate: None };
            let told = desk.describe(number, &order).to_string();
            books.orders.push(order);
            Ok((StatusCode::CREATED, at(format!("/order/{number}")), told).into_response())
        }
        "order" => {
            let number = number(1)?;
            let order = books.orders.get(number).ok_or_else(nothing)?;
            Ok(desk.describe(number, order).to_string().into_response())
        }
        kind @ ("authorization" | "challenge") => {
            let (number, n) = (number(1)?, number(2)?);
            let thumbprint = books.accounts[said.account].thumbprint.clone();
            let order = books.orders.get(number).ok_or_else(nothing)?;
            let (name, token) = (order.names.get(n).ok_or_else(nothing)?.clone(), order.tokens[n].clone());
            let (status, error) = match order.proved.get(&name) {
                None => ("pending", Value::Null),
                Some(Ok(())) => ("valid", Value::Null),
                Some(Err(why)) => {
                    ("invalid", json!({ "type": "urn:ietf:params:acme:error:connection", "detail": why }))
                }
            };
            let mut challenge = json!({
                "type": "tls-alpn-01", "url": format!("{base}/challenge/{number}/{n}"), "token": token, "status": status,
            });
            if kind == "challenge" {
                let wanted = Sha256::digest(format!("{token}.{thumbprint}")).into();
                let desk = desk.clone();
                tokio::spawn(async move {
                    let seen = desk.look(&name, wanted).await;
                    let mut books = desk.books();
                    books.unproved += usize::from(seen.is_err());
                    books.orders[number].proved.insert(name, seen);
                });
                return Ok(challenge.to_string().into_response());
            }
            if !error.is_null() {
                challenge["error"] = error;
            }
            let authorization = json!({
                "status": status, "identifier": { "type": "dns", "value": name }, "challenges": [challenge],
            });
            Ok(authorization.to_string().into_response())
        }
        "finalize" => {
            let number = number(1)?;
            let order = books.orders.get_mut(number).ok_or_else(nothing)?;
            if order.proved.values().filter(|proof| proof.is_ok()).count() != order.names.len() {
                return Err((StatusCode::FORBIDDEN, "orderNotReady", "prove the names first".into()));
            }
            let csr = BASE64.decode(said.payload["csr"].as_str().unwrap_or_default()).unwrap_or_default();
            order.certificate = Some(desk.sign(&csr, &order.names)?);
            Ok(desk.describe(number, order).to_string().into_response())
        }
        "certificate" => {
            let chain = books.orders.get(number(1)?).and_then(|order| order.certificate.clone()).ok_or_else(nothing)?;
            Ok(([(header::CONTENT_TYPE, "application/pem-certificate-chain")], chain).into_response())
        }
        _ => Err(nothing()),
    }
}
