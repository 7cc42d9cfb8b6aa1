//! Descriptors over a Unix socket (SCM_RIGHTS, unix(7)).

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Descriptors of one message: more than a gateway has listening sockets.
const MAX: usize = 16;
/// Longest text beside them, bytes.
const MAX_TEXT: usize = 64 << 10;

/// Sends `text` with `descriptors`, duplicates of which the other side gets. Blocks.
///
/// # Errors
/// The other side is gone, or they are more than a message carries.
pub fn send(stream: &UnixStream, text: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if text.len() > MAX_TEXT || descriptors.len() > MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut whole = u32::try_from(text.len()).unwrap_or_default().to_be_bytes().to_vec();
    whole.extend_from_slice(text);
    let mut space = [0; rustix::cmsg_space!(ScmRights(MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(stream, &[IoSlice::new(&whole)], &mut beside, SendFlags::NOSIGNAL)?;
    // The descriptors go with the first byte; the rest is only text.
    let mut stream = stream;
    stream.write_all(whole.get(sent..).unwrap_or_default())
}

/// The next text and the descriptors with it, which are closed on exec. Blocks.
///
/// # Errors
/// The other side is gone, or says what [`send`] does not.
pub fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [0; rustix::cmsg_space!(ScmRights(MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut length = [0; 4];
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut length)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut stream = stream;
    stream.read_exact(length.get_mut(received.bytes..).unwrap_or_default())?;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_TEXT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok((text, descriptors))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_socket_arrives_with_its_text_and_is_the_same_socket() {
        let (here, there) = UnixStream::pair().expect("a pair");
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("bound");
        let text = vec![b'x'; 40_000];
        let sender = {
            let text = text.clone();
            std::thread::spawn(move || {
                send(&here, &text, &[socket.as_fd()]).expect("sent");
                send(&here, b"again", &[]).expect("sent");
            })
        };
        let (got, mut descriptors) = receive(&there).expect("received");
        assert!(got == text && descriptors.len() == 1);
        assert_eq!(receive(&there).expect("received").0, b"again");
        sender.join().expect("no panic");
        let passed = UdpSocket::from(descriptors.remove(0));
        assert_eq!(passed.local_addr().expect("bound"), address, "though the first handle is closed");
        passed.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        UdpSocket::bind("127.0.0.1:0").expect("a port").send_to(b"hello", address).expect("sent");
        let mut buffer = [0; 8];
        assert_eq!(passed.recv(&mut buffer).expect("received"), 5);
        assert!(receive(&there).is_err(), "the other side is gone");
    }
}
