//! A certificate that the gateway orders for itself, from an authority of the tests.

mod authority;

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use antiphon::acme::Acme;
use antiphon::config::EngineKind;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use self::authority::{Authority, NAME, Refuse};
use super::support::{PATIENCE, Rig};

const DOMAIN: &str = "voice.example.com";

/// Takes any certificate: what is shown is the question here.
#[derive(Debug)]
struct Any(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for Any {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // By the key alone: a proof has a critical extension that is not known there.
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|_| rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding))?;
        let key = SubjectPublicKeyInfoDer::from(parsed.public_key().raw);
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// Connects and asks for `name` in one of `protocols`; gives the first certificate, DER, and the protocol that was chosen.
pub(crate) async fn handshake(
    address: SocketAddr,
    name: &str,
    protocols: &[&[u8]],
) -> io::Result<(Vec<u8>, Option<Vec<u8>>)> {
    let provider = Arc::new(ring::default_provider());
    let any = Any(provider.signature_verification_algorithms);
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.dangerous().with_custom_certificate_verifier(Arc::new(any));
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    let stream = TcpStream::connect(address).await?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    let (_, tls) = stream.get_ref();
    let leaf = tls.peer_certificates().and_then(|chain| chain.first()).map(|leaf| leaf.to_vec());
    Ok((leaf.unwrap_or_default(), tls.alpn_protocol().map(<[u8]>::to_vec)))
}

/// A gateway whose state is in `folder`.
async fn gateway(authority: &Authority, folder: &Path) -> Rig {
    let (directory, roots) = (authority.directory.clone(), Some(authority.roots.clone()));
    let acme = Acme { domains: vec![DOMAIN.into()], email: "ops@example.com".into(), directory, roots };
    Rig::with(|config| {
        config.engine.kind = EngineKind::Tone;
        config.http.acme = Some(acme);
        config.state.dir = folder.to_owned();
    })
    .await
}

async fn shown(rig: &Rig) -> Vec<u8> {
    let (leaf, spoken) = handshake(rig.app.http(), DOMAIN, &[b"h2", b"http/1.1"]).await.expect("TLS");
    assert_eq!(spoken.as_deref(), Some(&b"h2"[..]));
    leaf
}

/// Who issued a certificate.
fn issuer(leaf: &[u8]) -> String {
    let (_, parsed) = x509_parser::parse_x509_certificate(leaf).expect("a certificate");
    parsed.issuer().to_string()
}

/// Waits until `done`.
async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let waited = timeout(2 * PATIENCE, async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("{what}: it never came to that"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_ordered_proved_kept_and_renewed_and_no_failure_takes_it_away() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    // A second call says that there is one already.
    let _ = ring::default_provider().install_default();
    let authority = Authority::start(folder.path()).await;
    let rig = gateway(&authority, &state).await;
    // Until there is one: the proof is not looked at before the authority knows where the name leads to.
    assert!(!issuer(&shown(&rig).await).contains(NAME));
    authority.settle(Some(rig.app.http()), Refuse::Nothing);
    until("the first certificate", async || issuer(&shown(&rig).await).contains(NAME)).await;
    let first = shown(&rig).await;
    let (accounts, contact, orders, [spoilt, ..]) = authority.told();
    assert_eq!((accounts, orders, spoilt), (1, 1, 1), "a nonce that has expired is asked for again");
    assert_eq!(contact, serde_json::json!(["mailto:ops@example.com"]));
    for file in ["acme/account.json", "acme/certificate.pem"] {
        let mode = state.join(file).metadata().expect("kept").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    // Nobody is shown a proof that was seen.
    assert!(handshake(rig.app.http(), DOMAIN, &[b"acme-tls/1"]).await.is_err());
    rig.app.drain().await;

    // It is due, and neither a refused order nor a proof that is not found takes it away.
    for refuse in [Refuse::Orders, Refuse::Proofs] {
        authority.settle(None, refuse);
        let rig = gateway(&authority, &state).await;
        assert_eq!(shown(&rig).await, first, "what is kept is shown at once");
        authority.settle(Some(rig.app.http()), refuse);
        let failures = || {
            let (.., [_, refused, unproved]) = authority.told();
            if refuse == Refuse::Orders { refused } else { unproved }
        };
        until("a failure", async || failures() > 0).await;
        assert_eq!(shown(&rig).await, first);
        rig.app.drain().await;
    }

    authority.settle(None, Refuse::Nothing);
    let rig = gateway(&authority, &state).await;
    authority.settle(Some(rig.app.http()), Refuse::Nothing);
    until("the renewal", async || shown(&rig).await != first).await;
    assert!(issuer(&shown(&rig).await).contains(NAME));
    assert_eq!(authority.told().0, 1, "the account is kept");
    rig.app.drain().await;
}
