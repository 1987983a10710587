//! A FreeFlow that is changed only while this process leads.
//!
//! A process that was stopped for a while goes on where it was, before it hears that another one leads: its changes
//! would be those of then.
use super::leader::Term;
use super::target::{Following, Target, TargetError};
use freeflow_orchestrator::objects::AnyObject;

/// A target, and the term in which it may be changed.
pub struct Fenced<T> {
    pub target: T,
    pub term: Term,
}

fn over() -> TargetError {
    TargetError::Away("this controller leads no more".into())
}

impl<T: Target> Target for Fenced<T> {
    async fn present(&mut self) -> Result<Vec<AnyObject>, TargetError> {
        self.target.present().await
    }

    async fn apply(&mut self, objects: &[AnyObject]) -> Result<Vec<AnyObject>, TargetError> {
        let _change = self.term.change().await.ok_or_else(over)?;
        self.target.apply(objects).await
    }

    async fn delete(&mut self, object: &AnyObject) -> Result<(), TargetError> {
        let _change = self.term.change().await.ok_or_else(over)?;
        self.target.delete(object).await
    }

    async fn following(&mut self, objects: &[AnyObject]) -> Result<Vec<Following>, TargetError> {
        self.target.following(objects).await
    }
}
