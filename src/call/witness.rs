//! Who keeps an account of every call.

use super::{CallEvent, CallId, CallInfo, CallMeta, Dialling};

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
    fn happened(&self, id: &CallId, event: &CallEvent);
    /// It is over, however it ended.
    fn ended(&self, call: &CallInfo);
}
