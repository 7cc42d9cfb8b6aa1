//! TLS of a connection, by rustls as everywhere. The certificate is always verified: what is not would be read by any machine
//! in between.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::ClientConfig;
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

use crate::pem;

/// How certificates are judged: by the authorities of a PEM file, or by those of the system.
///
/// # Errors
/// The file, and what is wrong with it.
pub(super) fn client(authorities: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let versions = versions.map_err(|error| error.to_string())?;
    let Some(path) = authorities else {
        let judged = versions.with_platform_verifier().map_err(|error| error.to_string())?;
        return Ok(Arc::new(judged.with_no_client_auth()));
    };
    Ok(Arc::new(versions.with_root_certificates(pem::authorities(path)?).with_no_client_auth()))
}

/// Makes TLS for `tokio-postgres`.
#[derive(Clone)]
pub(super) struct Tls(pub(super) Arc<ClientConfig>);

impl MakeTlsConnect<Socket> for Tls {
    type Stream = Secured;
    type TlsConnect = Named;
    type Error = InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Named, InvalidDnsNameError> {
        Ok(Named(self.0.clone(), ServerName::try_from(host.to_owned())?))
    }
}

/// The same for one server.
pub(super) struct Named(Arc<ClientConfig>, ServerName<'static>);

impl TlsConnect<Socket> for Named {
    type Stream = Secured;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Secured>> + Send>>;

    fn connect(self, stream: Socket) -> Self::Future {
        Box::pin(async move { TlsConnector::from(self.0).connect(self.1, stream).await.map(Secured) })
    }
}

/// A connection with TLS.
pub(super) struct Secured(tokio_rustls::client::TlsStream<Socket>);

impl AsyncRead for Secured {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl TlsStream for Secured {
    fn channel_binding(&self) -> ChannelBinding {
        // The certificate is verified, which is what binding is for.
        ChannelBinding::none()
    }
}
