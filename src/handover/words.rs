//! What two gateways say to each other while one takes the other's place.
//!
//! A word is a length (32 bits, big-endian), a byte for its kind, and its content.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::place::{Datagram, Kind};

/// Longest word, bytes: the Call-IDs of ten thousand calls.
const MAX: usize = 4 << 20;

/// One word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// From the new one: it has everything, and reads when it is told to.
    Ready {
        /// A Unix socket that speaks HTTP, where it answers what comes to the old one on connections that are kept. A version
        /// that does not know it neither says nor reads it.
        http: Option<String>,
    },
    /// From the old one: it reads no more. Where it answers requests that are passed on, and Call-IDs that are its own.
    Yours {
        /// A Unix socket that speaks HTTP.
        http: String,
        /// As [`Word::Calls`].
        calls: Vec<String>,
    },
    /// From the old one: more Call-IDs that are its own.
    Calls(Vec<String>),
    /// From the old one: how many calls it still has.
    Left(u32),
    /// From the new one: what reached it and is the other's.
    Passed(Kind, Datagram),
}

impl Word {
    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; 4];
        match self {
            Word::Ready { http } => {
                bytes.push(0);
                bytes.extend(http.iter().flat_map(|http| http.bytes()));
            }
            Word::Yours { http, calls } => {
                bytes.push(1);
                serde_json::to_writer(&mut bytes, &(http, calls))?;
            }
            Word::Calls(calls) => {
                bytes.push(2);
                serde_json::to_writer(&mut bytes, calls)?;
            }
            Word::Left(calls) => {
                bytes.push(3);
                bytes.extend(calls.to_be_bytes());
            }
            Word::Passed(kind, Datagram { from, bytes: content }) => {
                bytes.push(match kind {
                    Kind::Sip => 4,
                    Kind::WebRtc => 5,
                });
                bytes.extend(format!("{from}\n").as_bytes());
                bytes.extend_from_slice(content);
            }
        }
        let length = u32::try_from(bytes.len() - 4).map_err(io::Error::other)?;
        if let Some(head) = bytes.first_chunk_mut() {
            *head = length.to_be_bytes();
        }
        Ok(bytes)
    }

    fn decode(word: &[u8]) -> Option<Word> {
        let (kind, content) = word.split_first()?;
        Some(match kind {
            0 => {
                let http = std::str::from_utf8(content).ok()?;
                Word::Ready { http: (!http.is_empty()).then(|| http.to_owned()) }
            }
            1 => {
                let (http, calls) = serde_json::from_slice(content).ok()?;
                Word::Yours { http, calls }
            }
            2 => Word::Calls(serde_json::from_slice(content).ok()?),
            3 => Word::Left(u32::from_be_bytes(content.try_into().ok()?)),
            4 | 5 => {
                let end = content.iter().position(|byte| *byte == b'\n')?;
                let from: SocketAddr = std::str::from_utf8(content.get(..end)?).ok()?.parse().ok()?;
                let bytes = content.get(end + 1..)?.to_vec().into();
                Word::Passed(if *kind == 4 { Kind::Sip } else { Kind::WebRtc }, Datagram { from, bytes })
            }
            _ => return None,
        })
    }
}

/// Says `word`.
///
/// # Errors
/// The other side is gone.
pub async fn write(to: &mut (impl AsyncWrite + Unpin), word: &Word) -> io::Result<()> {
    to.write_all(&word.encode()?).await
}

/// The next word. Not cancel safe.
///
/// # Errors
/// The other side is gone, or says what this version does not know.
pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Word> {
    let length = usize::try_from(from.read_u32().await?).unwrap_or(usize::MAX);
    if length > MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut word = vec![0; length];
    from.read_exact(&mut word).await?;
    Word::decode(&word).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_word_comes_back_as_it_was_said_and_garbage_is_refused() {
        let datagram = |from: &str, bytes: &'static [u8]| Datagram {
            from: from.parse().expect("an address"),
            bytes: bytes.into(),
        };
        let said = [
            Word::Ready { http: None },
            Word::Ready { http: Some("/run/b.sock".into()) },
            Word::Yours { http: "/run/a.sock".into(), calls: vec!["a@b".into(), "\"c".into()] },
            Word::Calls(Vec::new()),
            Word::Left(7),
            Word::Passed(Kind::Sip, datagram("192.0.2.1:5060", b"BYE\r\n\n")),
            Word::Passed(Kind::WebRtc, datagram("[2001:db8::1]:9", b"")),
        ];
        let mut stream = Vec::new();
        for word in &said {
            write(&mut stream, word).await.expect("written");
        }
        let mut from = stream.as_slice();
        for word in &said {
            assert_eq!(&read(&mut from).await.expect("read"), word);
        }
        assert_eq!(read(&mut from).await.expect_err("the end").kind(), io::ErrorKind::UnexpectedEof);
        for garbage in
            [&[0, 0, 0, 0][..], &[0xff; 5], &[0, 0, 0, 1, 9], &[0, 0, 0, 3, 4, b'x', b'\n'], &[0, 0, 0, 2, 3, 1]]
        {
            let error = read(&mut &*garbage).await.expect_err("garbage");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{garbage:?}");
        }
    }
}
