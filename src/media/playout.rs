//! playout
