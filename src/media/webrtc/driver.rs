//! Moves the task that drives a peer connection from one runtime to another.
//!
//! Owns the driver's future and nothing inside it. The future starts on the control runtime, because an answer
//! needs a running driver before anybody knows which shard the call will live on; [`Driver::move_here`] then
//! takes it to the caller's runtime, so that sending a packet wakes a task of the same thread.
//!
//! # Why
//! `webrtc` asks its `Runtime` to spawn the driver and keeps only a handle to abort it, and the driver touches no
//! reactor of its own here: its sockets are queues and its timers follow it (both are made in `crate::webrtc`). So
//! its future may change threads between two polls.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use ::webrtc::runtime::JoinHandle;
use futures_util::task::AtomicWaker;
use tokio::sync::{Notify, oneshot};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A handle to a connection's driver, wherever it runs. Clones mean the same driver.
#[derive(Clone, Default)]
pub struct Driver(Arc<Seat>);

#[derive(Default)]
struct Seat {
    /// Something below is to be looked at: the only thing a poll reads when nothing is wanted.
    called: AtomicBool,
    stop: AtomicBool,
    finished: AtomicBool,
    /// Who wants the future.
    wanted: Mutex<Option<oneshot::Sender<Task>>>,
    waker: AtomicWaker,
    /// Woken once, when `finished` is set.
    ended: Notify,
}

impl Driver {
    /// Runs `task` on the current runtime.
    pub fn start(&self, task: Task) {
        tokio::spawn(Hosted { task: Some(task), seat: self.0.clone() });
    }

    /// Takes the task from wherever it runs and runs it on the current runtime from now on.
    ///
    /// # Errors
    /// The driver has ended.
    pub async fn move_here(&self) -> io::Result<()> {
        let (give, take) = oneshot::channel();
        *self.0.lock() = Some(give);
        self.0.call();
        match take.await {
            Ok(task) => {
                self.start(task);
                Ok(())
            }
            Err(_) => Err(io::Error::new(io::ErrorKind::NotConnected, "the WebRTC session has ended")),
        }
    }

    /// Waits until the driver has run to its end, was aborted, or panicked.
    pub async fn ended(&self) {
        let ended = self.0.ended.notified();
        if !self.is_finished() {
            ended.await;
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("finished", &self.0.finished.load(Ordering::Relaxed)).finish()
    }
}

impl JoinHandle for Driver {
    fn detach(&self) {
        // The task belongs to its runtime; dropping a handle stops nothing.
    }

    fn abort(&self) {
        self.0.stop.store(true, Ordering::Release);
        self.0.call();
    }

    fn is_finished(&self) -> bool {
        self.0.finished.load(Ordering::Acquire)
    }
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, Option<oneshot::Sender<Task>>> {
        // An `Option` cannot be left half written, so a poisoned lock is still good.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self) {
        self.called.store(true, Ordering::Release);
        if self.finished.load(Ordering::Acquire) {
            // Polling has ended: dropping the request tells the task that made it.
            self.lock().take();
        }
        self.waker.wake();
    }
}

/// The task as a runtime sees it.
struct Hosted {
    task: Option<Task>,
    seat: Arc<Seat>,
}

impl Future for Hosted {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        // Before looking, or a call between the look and the registration would go unheard.
        this.seat.waker.register(cx.waker());
        if this.seat.called.swap(false, Ordering::AcqRel) {
            if this.seat.stop.load(Ordering::Acquire) {
                this.end();
                return Poll::Ready(());
            }
            let wanted = this.seat.lock().take();
            if let (Some(wanted), Some(task)) = (wanted, this.task.take()) {
                match wanted.send(task) {
                    Ok(()) => return Poll::Ready(()),
                    // The task that asked has gone; carry on here.
                    Err(task) => this.task = Some(task),
                }
            }
        }
        let Some(task) = this.task.as_mut() else { return Poll::Ready(()) };
        let done = task.as_mut().poll(cx);
        if done.is_ready() {
            this.end();
        }
        done
    }
}

impl Hosted {
    fn end(&mut self) {
        self.task = None;
        self.seat.finished.store(true, Ordering::Release);
        self.seat.lock().take();
        self.seat.ended.notify_waiters();
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        // The runtime shut down or the task panicked: no task may wait for it. A task handed over is gone already.
        if self.task.is_some() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use tokio::runtime::Builder;
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn the_task_continues_on_the_thread_that_takes_it() {
        let driver = Driver::default();
        let first = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime");
        let (ask, mut asked) = mpsc::channel::<()>(1);
        let (tell, mut told) = mpsc::channel(1);
        let task = async move {
            while asked.recv().await.is_some() {
                tell.send(thread::current().id()).await.expect("the test waits for it");
            }
        };
        first.block_on(async { driver.start(Box::pin(task)) });
        first.block_on(ask.send(())).expect("running");
        let before = first.block_on(told.recv()).expect("running");
        let second = Builder::new_current_thread().enable_all().build().expect("runtime");
        let after = second.block_on(async {
            driver.move_here().await.expect("running");
            ask.send(()).await.expect("running");
            told.recv().await.expect("running")
        });
        assert_ne!(before, thread::current().id());
        assert_eq!(after, thread::current().id());
        drop(ask);
        second.block_on(driver.ended());
        assert!(second.block_on(driver.move_here()).is_err());
    }

    #[tokio::test]
    async fn a_panic_is_an_end() {
        let driver = Driver::default();
        driver.start(Box::pin(async { panic!("on purpose") }));
        driver.ended().await;
        assert!(driver.is_finished());
    }

    #[tokio::test]
    async fn abort_ends_the_task_and_those_that_wait_for_it_learn() {
        let driver = Driver::default();
        driver.start(Box::pin(std::future::pending()));
        driver.abort();
        driver.ended().await;
        assert!(driver.move_here().await.is_err());
    }
}
