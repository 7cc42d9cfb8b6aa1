//! webrtc
