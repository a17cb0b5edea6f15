//! Every duration and limit of the lease protocol, in one place, with the inequalities that make it safe.

use std::time::Duration;

/// How long a grant or a renewal lasts, counted by the owner from when the request arrived and by the holder from
/// when it sent it.
pub const TTL: Duration = Duration::from_secs(10);

/// Longest time to live that a holder believes an owner, whatever the owner says.
pub const TTL_MAX: Duration = Duration::from_secs(60);

/// A holder renews when this share of the time to live has passed (one third), so that two renewals in a row may be
/// lost without losing the lease.
pub const RENEW_DIVISOR: u32 = 3;

/// How long before the owner's deadline a holder stops using a lease (δ). It pays for clocks that run at different
/// speeds, and for an operation that was begun in the last moment.
pub const USE_MARGIN: Duration = Duration::from_millis(500);

/// A lease that was not renewed is reclaimable at its deadline, and ended this much later even if nobody needs its
/// memory. A late renewal still rescues it in between.
pub const SWEEP: Duration = Duration::from_secs(2);

/// How long a member of an instance may be silent before the others take it for dead.
pub const SUSPICION: Duration = Duration::from_millis(1000);

/// How long the member that takes over needs to claim its term at every owner.
pub const CLAIM: Duration = Duration::from_millis(500);

/// What is left for queues, a second claimant and slow machines.
pub const SLACK: Duration = Duration::from_millis(2000);

/// How long the holder waits for the answer to one request.
pub const CALL_DEADLINE: Duration = Duration::from_millis(2500);

/// How long the holder waits before it repeats a request that got no answer.
pub const RETRY: Duration = Duration::from_millis(300);

/// How long the holder goes on asking one owner for one lease before it gives the owner up.
pub const ACQUIRE_PATIENCE: Duration = Duration::from_secs(5);

/// How long an owner keeps a request waiting for memory whose fence does not hold yet.
pub const FENCE_PATIENCE: Duration = Duration::from_secs(2);

/// Most leases of one owner, waiting requests included.
pub const LEASES_MAX: usize = 4096;

/// Most leases of one holder at one owner.
pub const LEASES_PER_HOLDER_MAX: usize = 1024;

/// Most leases of one instance at one owner.
pub const LEASES_PER_INSTANCE_MAX: usize = 256;

/// Most nodes of a succession set.
pub const MEMBERS_MAX: usize = 64;

/// Longest name of a user's lease, in bytes.
pub const LABEL_BYTES_MAX: usize = 64;

/// Longest text of an owner on why it took a lease back, in bytes.
pub const REASON_BYTES_MAX: usize = 128;

/// Most requests that wait for a fence at one owner.
pub const WAITING_MAX: usize = 256;

/// Most requests for one and the same lease that wait for a fence.
pub const WAITING_KEYS_MAX: usize = 8;

/// How many ended leases an owner remembers, so that a request that arrives late does not bring one back.
pub const ENDED_MAX: usize = 4096;

/// How many instances without a lease an owner still knows the term of.
pub const TERMS_MAX: usize = 4096;

/// Most leases that one call of a holder may ask for.
pub const BATCH_MAX: usize = 1024;

// A member that takes over must have claimed before the leases of the dead conductor can run out, and the last
// renewal may have been sent a whole renewal period before the death.
const _: () = assert!(millis(SUSPICION) + millis(CLAIM) + millis(SLACK) < millis(TTL));
const _: () = assert!(millis(SUSPICION) + millis(CLAIM) + millis(SLACK) + millis(TTL) / (RENEW_DIVISOR as u128) < millis(TTL));
// One renewal may be lost, wait for its whole answer and be repeated, all before the holder must stop.
const _: () = assert!(millis(TTL) / (RENEW_DIVISOR as u128) + 2 * millis(CALL_DEADLINE) + millis(RETRY) + millis(USE_MARGIN) < millis(TTL));
// The owner answers a request that waits for a fence before the holder stops waiting for the answer.
const _: () = assert!(millis(FENCE_PATIENCE) < millis(CALL_DEADLINE));
const _: () = assert!(millis(CALL_DEADLINE) < millis(ACQUIRE_PATIENCE));
// A grant that took as long as a holder waits for it is still of use.
const _: () = assert!(millis(CALL_DEADLINE) + millis(USE_MARGIN) < millis(TTL));
const _: () = assert!(millis(TTL) <= millis(TTL_MAX));

const fn millis(duration: Duration) -> u128 {
    duration.as_millis()
}
