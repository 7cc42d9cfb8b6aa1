//! A number of seats that may change while they are taken: of calls, above all.
//!
//! # Why
//! A semaphore takes back only permits that are free. Where fewer seats are wanted than are taken, those who sit keep theirs, and
//! nobody sits down until enough have gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The seats. Cheap to clone; clones mean the same ones.
#[derive(Clone, Debug)]
pub struct Seats(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    taken: AtomicUsize,
    most: AtomicUsize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Seat(Arc<Inner>);

impl Seats {
    /// So many, all free.
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Inner { taken: AtomicUsize::new(0), most: AtomicUsize::new(most) }))
    }

    /// Takes one; `None`: there is none free.
    pub fn take(&self) -> Option<Seat> {
        let most = self.most();
        let next = |taken: usize| (taken < most).then_some(taken + 1);
        self.0.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()?;
        Some(Seat(self.0.clone()))
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.0.taken.load(Ordering::Acquire)
    }

    /// How many there are.
    pub fn most(&self) -> usize {
        self.0.most.load(Ordering::Acquire)
    }

    /// Whether one is free.
    pub fn has_room(&self) -> bool {
        self.taken() < self.most()
    }

    /// Makes it so many. Who sits keeps the seat.
    pub fn set(&self, most: usize) {
        self.0.most.store(most, Ordering::Release);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sits_keeps_the_seat_where_there_are_fewer_and_nobody_comes_before_enough_have_gone() {
        let seats = Seats::new(2);
        let (first, second) = (seats.take().expect("free"), seats.take().expect("free"));
        assert!(seats.take().is_none() && !seats.has_room());
        seats.set(1);
        assert_eq!((seats.taken(), seats.most()), (2, 1));
        drop(first);
        assert!(seats.take().is_none(), "the second still sits");
        drop(second);
        let last = seats.take().expect("free");
        assert!(seats.take().is_none());
        seats.set(2);
        assert!(seats.take().is_some());
        drop(last);
        assert_eq!(seats.taken(), 0);
    }
}
