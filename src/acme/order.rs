//! The exchange with an authority: account, order, proof, certificate.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use bytes::{Bytes, BytesMut};
use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, BodyWrapper, BytesResponse, ChallengeType, Error, HttpClient,
    Identifier, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use super::{Acme, put, usable};
use crate::certificate::Certificate;
use crate::pem;
use crate::reach::cause;

/// The account and its key.
const ACCOUNT: &str = "account.json";
/// Longest wait for one answer of the authority.
const ANSWER: Duration = Duration::from_secs(30);
/// Largest answer: a chain of certificates has a few kilobytes.
const MAX_ANSWER: usize = 1 << 20;
/// How long an authority may take to look at a proof, and to sign.
const PATIENCE: RetryPolicy =
    RetryPolicy::new().initial_delay(Duration::from_millis(250)).timeout(Duration::from_secs(180));
/// The account is unknown (RFC 8555 section 6.7): the authority has forgotten it.
const FORGOTTEN: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// Who signs.
pub(super) struct Authority<'a> {
    config: &'a Acme,
    client: reqwest::Client,
}

/// What is stored of an account.
#[derive(Serialize, Deserialize)]
struct Stored {
    directory: String,
    credentials: AccountCredentials,
}

/// Whose account is stored in `folder`.
pub(super) fn account_of(folder: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        directory: String,
    }
    let text = std::fs::read(folder.join(ACCOUNT)).ok()?;
    serde_json::from_slice::<Named>(&text).ok().map(|named| named.directory)
}

impl<'a> Authority<'a> {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// The roots cannot be read.
    pub(super) fn new(config: &'a Acme) -> Result<Self, String> {
        let mut client = reqwest::Client::builder().https_only(true).connect_timeout(ANSWER).timeout(ANSWER);
        if let Some(file) = &config.roots {
            let roots = pem::certificates(file).map_err(|error| format!("roots: {error}"))?;
            let roots = roots.iter().map(|root| reqwest::Certificate::from_der(root));
            let roots = roots.collect::<Result<Vec<_>, _>>().map_err(|error| format!("roots: {error}"))?;
            client = client.tls_certs_only(roots);
        }
        let client = client.build().map_err(|error| format!("no HTTPS client: {}", cause(&error)))?;
        Ok(Self { config, client })
    }

    /// A certificate for `names`, which `listener` proves: the chain and behind it the key, PEM.
    pub(super) async fn order(
        &self,
        folder: &Path,
        names: &[String],
        listener: &Certificate,
    ) -> Result<String, String> {
        let account = self.account(folder).await?;
        let identifiers: Vec<Identifier> = names.iter().map(|name| Identifier::Dns(name.clone())).collect();
        let ordered = account.new_order(&NewOrder::new(&identifiers)).await;
        if let Err(Error::Api(problem)) = &ordered
            && problem.r#type.as_deref() == Some(FORGOTTEN)
        {
            // The next attempt makes another one.
            let _ = std::fs::remove_file(folder.join(ACCOUNT));
        }
        let mut order = ordered.map_err(|error| told("the order was refused", &error))?;
        prove(&mut order, listener).await?;
        let key = order.finalize().await.map_err(|error| told("the request to sign was refused", &error))?;
        let chain = order.poll_certificate(&PATIENCE).await.map_err(|error| told("nothing was signed", &error))?;
        Ok(format!("{}\n{key}", chain.trim_end()))
    }

    /// The stored account, or a new one. The operator who configures an authority agrees to its terms.
    async fn account(&self, folder: &Path) -> Result<Account, String> {
        let file = folder.join(ACCOUNT);
        let builder = || Account::builder_with_http(Box::new(Web(self.client.clone())));
        let unreached = |error: &Error| told("the authority cannot be used", error);
        let stored = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Stored>(&text).ok());
        if let Some(stored) = stored.filter(|stored| stored.directory == self.config.directory) {
            return builder().from_credentials(stored.credentials).await.map_err(|error| unreached(&error));
        }
        let contact = (!self.config.email.is_empty()).then(|| format!("mailto:{}", self.config.email));
        let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
        let new = NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
        let directory = self.config.directory.clone();
        let (account, credentials) =
            builder().create(&new, directory.clone(), None).await.map_err(|error| unreached(&error))?;
        let text = serde_json::to_vec(&Stored { directory, credentials }).map_err(|error| error.to_string())?;
        put(&file, &text)?;
        Ok(account)
    }
}

/// Shows what the authority asks for, and waits until it has seen that.
async fn prove(order: &mut Order, listener: &Certificate) -> Result<(), String> {
    let mut asked = order.authorizations();
    while let Some(authorization) = asked.next().await {
        let mut authorization = authorization.map_err(|error| told("the order cannot be read", &error))?;
        let name = authorization.identifier().to_string();
        match authorization.status {
            AuthorizationStatus::Valid => continue,
            AuthorizationStatus::Pending => {}
            status => return Err(format!("{name}: its authorization is {status:?}")),
        }
        let Some(mut challenge) = authorization.challenge(ChallengeType::TlsAlpn01) else {
            return Err(format!(
                "{name}: the authority does not offer tls-alpn-01, the proof that this gateway can give"
            ));
        };
        let proof = proof(&name, challenge.key_authorization().digest().as_ref());
        listener.prove(&name, Some(proof.map_err(|error| format!("{name}: no proof can be made: {error}"))?));
        challenge.set_ready().await.map_err(|error| told(&format!("{name}: the proof was refused"), &error))?;
    }
    match order.poll_ready(&PATIENCE).await {
        Ok(OrderStatus::Ready) => Ok(()),
        Ok(status) => Err(reason(order).await.unwrap_or_else(|| format!("the order is {status:?}"))),
        Err(error) => Err(reason(order).await.unwrap_or_else(|| told("the proof was not accepted", &error))),
    }
}

/// What the authority did not like about the proofs.
async fn reason(order: &mut Order) -> Option<String> {
    let mut asked = order.authorizations();
    while let Some(Ok(mut authorization)) = asked.next().await {
        let name = authorization.identifier().to_string();
        let state = authorization.refresh().await.ok()?;
        if let Some(problem) = state.challenges.iter().find_map(|challenge| challenge.error.as_ref()) {
            let detail = problem.detail.as_deref().unwrap_or("no reason is given");
            return Some(format!(
                "{name}: the proof was not accepted: {detail}. The authority connects to port 443 of that name, which must \
                 lead to [http] bind"
            ));
        }
    }
    None
}

/// The certificate that says so (RFC 8737 section 3): for `name`, with the digest of the key authorisation.
fn proof(name: &str, digest: &[u8]) -> Result<CertifiedKey, String> {
    let made = || {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest)];
        let key = KeyPair::generate()?;
        Ok((params.self_signed(&key)?, key))
    };
    let (certificate, key) = made().map_err(|error: rcgen::Error| error.to_string())?;
    usable(certificate.der().clone(), &key)
}

fn told(what: &str, error: &Error) -> String {
    match error {
        Error::Api(problem) => {
            let detail = problem.detail.as_deref().unwrap_or("no reason is given");
            let kind = problem.r#type.as_deref().map(|kind| format!(" ({kind})")).unwrap_or_default();
            format!("{what}: {detail}{kind}")
        }
        error => format!("{what}: {error}"),
    }
}

/// Our HTTP client as the crate asks for one.
struct Web(reqwest::Client);

impl HttpClient for Web {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let client = self.0.clone();
        let other = |text: String| Error::Other(text.into());
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(Body::new(body), MAX_ANSWER).await;
            let body = body.map_err(|error| other(error.to_string()))?;
            let asked = client.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body).send();
            let mut answer = asked.await.map_err(|error| other(cause(&error)))?;
            let mut response = Response::new(());
            *response.status_mut() = answer.status();
            *response.headers_mut() = answer.headers().clone();
            let mut bytes = BytesMut::new();
            while let Some(piece) = answer.chunk().await.map_err(|error| other(cause(&error)))? {
                if bytes.len() + piece.len() > MAX_ANSWER {
                    return Err(other(format!("an answer has more than {MAX_ANSWER} bytes")));
                }
                bytes.extend_from_slice(&piece);
            }
            Ok(BytesResponse { parts: response.into_parts().0, body: Box::new(bytes.freeze()) })
        })
    }
}
