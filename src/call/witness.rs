//! Who keeps an account of every call.

use super::{CallEvent, CallInfo, CallMeta, Dialling};

/// Told of everything that happens on every call, in order, by the tasks that do it: it must not wait.
///
/// # Why
/// Listeners of [`super::Calls::events`] that fall behind lose the oldest, which is right for monitoring and wrong for
/// an account that is to be complete.
pub trait Witness: Send + Sync + 'static {
    /// An outbound call before it is live; `trunk`: by name, where one carries it.
    fn dialling(&self, meta: &CallMeta, trunk: Option<&str>, state: &Dialling);
    /// A call is live.
    fn begun(&self, call: &CallInfo);
    /// Something happened on it.
    fn happened(&self, call: &CallMeta, event: &CallEvent);
    /// It is over, however it ended.
    fn ended(&self, call: &CallInfo);
}

/// Both are told, the first one first.
impl<A: Witness, B: Witness> Witness for (A, B) {
    fn dialling(&self, meta: &CallMeta, trunk: Option<&str>, state: &Dialling) {
        self.0.dialling(meta, trunk, state);
        self.1.dialling(meta, trunk, state);
    }

    fn begun(&self, call: &CallInfo) {
        self.0.begun(call);
        self.1.begun(call);
    }

    fn happened(&self, call: &CallMeta, event: &CallEvent) {
        self.0.happened(call, event);
        self.1.happened(call, event);
    }

    fn ended(&self, call: &CallInfo) {
        self.0.ended(call);
        self.1.ended(call);
    }
}
