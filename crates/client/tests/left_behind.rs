//! A child of `fork` has copies of its parent's objects; they refuse, and touch nothing.
mod common;

use common::FakeRouter;
use freeflow_client::{CompletionQueue, Context, Session, fork};
use freeflow_protocol::PROTOCOL;
use freeflow_verbs::VerbsError;
use std::sync::Arc;

#[test]
fn a_childs_copies_refuse() {
    let router = FakeRouter::start("fork", PROTOCOL);
    let session = Arc::new(Session::connect(&router.path).unwrap());
    let context = Context::open(&session).unwrap();
    let cq = CompletionQueue::create(&session, context.handle(), 4, None, false).unwrap();
    // The handler of `pthread_atfork` does this in the child.
    fork::note_child();
    assert!(session.left_behind() && !session.is_router_gone());
    assert_eq!(cq.poll(1, |_| ()), Err(VerbsError::DeviceFatal));
    assert_eq!(cq.arm(false), Err(VerbsError::DeviceFatal));
    assert_eq!(cq.destroy(), Err(VerbsError::DeviceFatal), "it is the parent's to destroy");
    assert_eq!(session.alloc_pd(context.handle()), Err(VerbsError::DeviceFatal));
    assert!(matches!(context.wait_event(&mut |_, _| ()), Err(None)));
    assert_eq!(router.objects().requests.len(), 3, "nothing was asked of the router");
    std::mem::forget(cq);
}
